# SPDX-License-Identifier: Apache-2.0
# libFuzzer on everything that reads foreign input; included last by CMakeLists.txt, in trees that are configured with
# GRADWIRE_FUZZ. The target fuzz_targets builds all of them. `make test` gives them half a minute together, and `make
# fuzz` gives them FUZZ_SECONDS (tools/coverage.sh).
if(NOT GRADWIRE_FUZZ)
  return()
endif()
if(NOT CMAKE_CXX_COMPILER_ID MATCHES Clang)
  message(FATAL_ERROR "GRADWIRE_FUZZ needs clang (libFuzzer is part of it): use cmake --preset fuzz")
endif()

add_custom_target(fuzz_targets)
set(fuzz_names "")

# gradwire_fuzz(folder/name [MAX_LEN bytes] [SOURCES more ...] [LINK ...] [SEEDS folders ...])
#   SEEDS   inputs to begin with, which are only read; tests/corpus/name is one of them where it exists
macro(gradwire_fuzz path)
  cmake_parse_arguments(arg "" "MAX_LEN" "SOURCES;LINK;SEEDS" ${ARGN})
  get_filename_component(name ${path} NAME)
  add_executable(${name} ${path}.cc ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${CMAKE_CURRENT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${arg_LINK} xxHash::xxHash ${GRADWIRE_FMT})
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  add_dependencies(fuzz_targets ${name})
  list(APPEND fuzz_names ${name})
  set(${name}_max_len 0)  # as long as the longest seed, at least 4096
  if(arg_MAX_LEN)
    set(${name}_max_len ${arg_MAX_LEN})
  endif()
  set(${name}_seeds ${arg_SEEDS})
  if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/corpus/${name})
    list(APPEND ${name}_seeds ${CMAKE_CURRENT_SOURCE_DIR}/corpus/${name})
  endif()
endmacro()

find_package(nlohmann_json REQUIRED)
file(GLOB golden CONFIGURE_DEPENDS wire/golden/*.gw)
file(COPY ${golden} DESTINATION ${CMAKE_BINARY_DIR}/golden)
gradwire_fuzz(wire/fuzz_decode LINK gradwire SEEDS ${CMAKE_BINARY_DIR}/golden)
gradwire_fuzz(server/fuzz_server MAX_LEN 16384 LINK gradwire_server nlohmann_json::nlohmann_json)
gradwire_fuzz(server/fuzz_hub MAX_LEN 2048 LINK gradwire_server nlohmann_json::nlohmann_json)
gradwire_fuzz(server/fuzz_client MAX_LEN 2048 LINK gradwire_server nlohmann_json::nlohmann_json)
gradwire_fuzz(server/fuzz_watch MAX_LEN 16384 LINK gradwire_watch gradwire)
gradwire_fuzz(learn/fuzz_learned LINK gradwire)

# Parts of the programs, which this tree does not build otherwise: the sources themselves.
find_package(ZLIB REQUIRED)
find_library(ZSTD_LIBRARY zstd)
find_path(ZSTD_INCLUDE zstd.h)
set(apps ${PROJECT_SOURCE_DIR}/apps)
set(train ${PROJECT_SOURCE_DIR}/src/train)
gradwire_fuzz(apps/fuzz_files MAX_LEN 16384 LINK gradwire gradwire_io nlohmann_json::nlohmann_json ZLIB::ZLIB
  SOURCES ${apps}/codec/npy.cc ${apps}/codec/packed.cc ${apps}/cli/files.cc ${apps}/cli/console.cc
    ${apps}/report/report_run.cc ${train}/data.cc ${train}/files.cc ${train}/idx.cc ${train}/cifar.cc
    ${train}/ag_news.cc ${train}/text.cc ${train}/order.cc)
target_include_directories(fuzz_files PRIVATE ${apps})
if(ZSTD_LIBRARY AND ZSTD_INCLUDE)
  target_include_directories(fuzz_files PRIVATE ${ZSTD_INCLUDE})
  target_link_libraries(fuzz_files PRIVATE ${ZSTD_LIBRARY})
  target_compile_definitions(fuzz_files PRIVATE GRADWIRE_HAS_ZSTD)
endif()

# Half a minute for all of them, but at least three seconds for each.
list(LENGTH fuzz_names count)
math(EXPR seconds "30 / ${count}")
if(seconds LESS 3)
  set(seconds 3)
endif()
foreach(name IN LISTS fuzz_names)
  # New inputs go to the first folder; the others are only read.
  file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/corpus/${name})
  add_test(NAME ${name} COMMAND ${name} -seed=1 -max_total_time=${seconds} -max_len=${${name}_max_len}
    -len_control=0 -timeout=60 -rss_limit_mb=2048 -verbosity=0 -print_final_stats=1
    -artifact_prefix=${CMAKE_BINARY_DIR}/${name}-
    ${CMAKE_BINARY_DIR}/corpus/${name} ${${name}_seeds})
  set_tests_properties(${name} PROPERTIES TIMEOUT 300 LABELS fuzz)
endforeach()
# For tools/coverage.sh.
string(REPLACE ";" "\n" lines "${fuzz_names}")
file(WRITE ${CMAKE_BINARY_DIR}/fuzz_targets.txt "${lines}\n")
