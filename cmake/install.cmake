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

# The C interface by itself is the component c: the libraries, gradwire.h, the files of pkg-config, and CMake's targets in
# a file of their own, because they need nothing that has to be found again.
if(GRADWIRE_C)
  set(c_targets gradwire_c)
  set(c_names gradwire gradwire_static)
  set(pc_archives "\${libdir}/libgradwire.a")
  if(TARGET gradwire_c_mpi)
    list(APPEND c_targets gradwire_c_mpi)
    list(APPEND c_names gradwire_mpi)
    # The one that needs the other comes first; it adds nothing to a program without MPI.
    set(pc_archives "\${libdir}/libgradwire_mpi.a ${pc_archives}")
  endif()
  install(TARGETS ${c_targets} EXPORT gradwireCTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT c)
  list(TRANSFORM c_targets APPEND _static)
  install(TARGETS ${c_targets} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT c)
  install(EXPORT gradwireCTargets NAMESPACE gradwire:: DESTINATION ${package_dir} COMPONENT c)
  install(FILES ${PROJECT_SOURCE_DIR}/include/gradwire.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT c)
  # Relative to the file itself, so that the folder can be moved.
  file(RELATIVE_PATH pc_prefix /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
  # What the archives need beside them. xxHash is inside.
  set(pc_private "-lhwy -lstdc++ -lm -pthread")
  if(GRADWIRE_FMT STREQUAL "fmt::fmt")
    set(pc_private "-lfmt ${pc_private}")
  endif()
  if(GRADWIRE_HAS_CUDA)
    set(pc_private "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static ${pc_private} -ldl -lrt")
  endif()
  foreach(name IN LISTS c_names)
    configure_file(${PROJECT_SOURCE_DIR}/cmake/${name}.pc.in ${CMAKE_CURRENT_BINARY_DIR}/${name}.pc @ONLY)
    install(FILES ${CMAKE_CURRENT_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT c)
  endforeach()
endif()

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/gradwireConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/gradwireConfig.cmake INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/gradwireConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/gradwireConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/gradwireConfigVersion.cmake
        DESTINATION ${package_dir} COMPONENT c)
