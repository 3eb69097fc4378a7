# SPDX-License-Identifier: Apache-2.0
# Highway, fmt and xxHash; nlohmann-json for reports. Where GRADWIRE_FETCH is off they are the machine's own, and one
# that is missing is named with its Debian package. Where it is on, for binaries that travel to other machines, their
# releases are fetched, checked against the sums below and compiled into static libraries: the linked module then
# needs neither package. The releases are those of Debian 12, which the tests run with. Every one is at its project.
# Where that cannot be reached, the environment variable GRADWIRE_MIRROR names a mirror of Debian (the address above
# its folder `pool`), which has the same releases, under one sum or under two where Debian has packed it again.
if(NOT GRADWIRE_FETCH)
  macro(gradwire_need package label debian)
    find_package(${package} QUIET)
    if(NOT ${package}_FOUND)
      message(FATAL_ERROR "${label} was not found. On Debian and Ubuntu: sudo apt install ${debian}. Elsewhere, "
        "-DGRADWIRE_FETCH=ON fetches Highway, fmt and xxHash from their releases and compiles them in.")
    endif()
  endmacro()
  gradwire_need(hwy Highway libhwy-dev)
  gradwire_need(fmt fmt libfmt-dev)
  gradwire_need(xxHash xxHash libxxhash-dev)
  return()
endif()

# gradwire_fetch(name variable url sha256 url sha256 ...): the first archive that answers, unpacked; the variable is its
# folder. A file with another sum is refused, from whichever host it comes.
function(gradwire_fetch name variable)
  set(folder ${CMAKE_BINARY_DIR}/fetched/${name})
  set(answers "")
  while(NOT EXISTS ${folder} AND ARGN)
    list(POP_FRONT ARGN url sum)
    if(url MATCHES "^/pool")  # no mirror is named
      continue()
    endif()
    message(STATUS "fetching ${url}")
    file(DOWNLOAD ${url} ${folder}.archive STATUS status TLS_VERIFY ON INACTIVITY_TIMEOUT 30)
    list(GET status 0 failed)
    list(GET status 1 words)
    if(NOT failed)
      file(SHA256 ${folder}.archive found)
      if(NOT found STREQUAL sum)
        message(FATAL_ERROR "${url} has the SHA-256 ${found}, and ${sum} is expected")
      endif()
      file(ARCHIVE_EXTRACT INPUT ${folder}.archive DESTINATION ${folder}.part)
      file(RENAME ${folder}.part ${folder})
    else()
      string(APPEND answers "\n  ${url}: ${words}")
    endif()
  endwhile()
  if(NOT EXISTS ${folder})
    message(FATAL_ERROR "${name} could not be fetched:${answers}\n"
      "GRADWIRE_MIRROR in the environment may name a mirror of Debian that has it.")
  endif()
  file(GLOB inside LIST_DIRECTORIES true ${folder}/*)
  set(${variable} ${inside} PARENT_SCOPE)
endfunction()

set(debian $ENV{GRADWIRE_MIRROR}/pool/main)
set(highway_sum 566fc77315878473d9a6bd815f7de78c73734acdcb745c3dde8579560ac5440e)
set(json_sum d69f9deb6a75e2580465c6c4c5111b89c4dc2fa94e3a85fcd2ffcd9a143d9273)
set(xxhash_sum 3bb6b7d6f30c591dd65aaaff1c8b7a5b94d81687998ca9400082c739a690436c)
gradwire_fetch(highway highway_folder
  https://github.com/google/highway/archive/refs/tags/1.0.3.tar.gz ${highway_sum}
  ${debian}/h/highway/highway_1.0.3.orig.tar.gz ${highway_sum})
gradwire_fetch(fmt fmt_folder
  https://github.com/fmtlib/fmt/archive/refs/tags/9.1.0.tar.gz
    5dea48d1fcddc3ec571ce2058e13910a0d4a6bab4cc09a809d8b1dd1c88ae6f2
  ${debian}/f/fmtlib/fmtlib_9.1.0+ds1.orig.tar.gz 84ce1c2d0be3a9863935137969dcec6970125caac032f82474640bfc81463583)
gradwire_fetch(xxhash xxhash_folder
  https://github.com/Cyan4973/xxHash/archive/refs/tags/v0.8.1.tar.gz ${xxhash_sum}
  ${debian}/x/xxhash/xxhash_0.8.1.orig.tar.gz ${xxhash_sum})

gradwire_fetch(json json_folder
  https://github.com/nlohmann/json/archive/refs/tags/v3.11.2.tar.gz ${json_sum}
  ${debian}/n/nlohmann-json3/nlohmann-json3_3.11.2.orig.tar.gz ${json_sum})

function(gradwire_fetched target include)
  add_library(${target} STATIC ${ARGN})
  target_include_directories(${target} SYSTEM PUBLIC ${include})
  target_compile_features(${target} PRIVATE cxx_std_17)
  target_compile_options(${target} PRIVATE -w)
  set_target_properties(${target} PROPERTIES UNITY_BUILD OFF)
endfunction()
gradwire_fetched(fetched_hwy ${highway_folder} ${highway_folder}/hwy/targets.cc ${highway_folder}/hwy/per_target.cc
  ${highway_folder}/hwy/aligned_allocator.cc ${highway_folder}/hwy/print.cc)
gradwire_fetched(fetched_fmt ${fmt_folder}/include ${fmt_folder}/src/format.cc)
add_library(fetched_json INTERFACE)
target_include_directories(fetched_json SYSTEM INTERFACE ${json_folder}/single_include)
add_library(nlohmann_json::nlohmann_json ALIAS fetched_json)
add_library(hwy::hwy ALIAS fetched_hwy)
add_library(fmt::fmt ALIAS fetched_fmt)
set(XXHASH_INCLUDE_DIR ${xxhash_folder} CACHE PATH "The folder of xxhash.h" FORCE)
find_package(xxHash REQUIRED)
