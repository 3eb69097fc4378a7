# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` leaves behind: the headers, one static library per folder, and a CMake package, so that
# a consumer says find_package(gradwire) and links gradwire::gradwire. Header-only dependencies do not appear
# in it (gradwire_folder() keeps them inside the build); those that are linked are found again by the config file.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/gradwire)
get_property(folders GLOBAL PROPERTY GRADWIRE_FOLDERS)
install(TARGETS gradwire ${folders} EXPORT gradwireTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT gradwireTargets NAMESPACE gradwire:: DESTINATION ${package_dir})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/gradwire DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING
  PATTERN *.h)

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/gradwireConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/gradwireConfig.cmake INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/gradwireConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/gradwireConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/gradwireConfigVersion.cmake
        DESTINATION ${package_dir})
