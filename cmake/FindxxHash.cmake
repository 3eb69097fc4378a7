# SPDX-License-Identifier: Apache-2.0
# xxHash as Debian ships it: a header and a library, no CMake package. Only the inlined form is used.
find_path(XXHASH_INCLUDE_DIR xxhash.h)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(xxHash REQUIRED_VARS XXHASH_INCLUDE_DIR)
if(xxHash_FOUND AND NOT TARGET xxHash::xxHash)
  add_library(xxHash::xxHash INTERFACE IMPORTED)
  target_include_directories(xxHash::xxHash INTERFACE ${XXHASH_INCLUDE_DIR})
  target_compile_definitions(xxHash::xxHash INTERFACE XXH_INLINE_ALL)
endif()
