# SPDX-License-Identifier: Apache-2.0
# The server's store on disk: C++ tests, the same files seen from Python (the rest of tests/CMakeLists.txt decides
# whether there is one: include this after it), and libFuzzer on what the server reads.
find_package(nlohmann_json REQUIRED)
gradwire_test(server/server_store_test SOURCES server/server_store_test.cc server/server_store_faults_test.cc
              LINK gradwire_server nlohmann_json::nlohmann_json)
gradwire_test(server/store_tool PROGRAM_ONLY LINK gradwire_server nlohmann_json::nlohmann_json)
if(python_ready EQUAL 0)
  gradwire_script(server_store_python_test server/test_server_store.py
    ${Python3_EXECUTABLE} -m pytest -q -p no:cacheprovider --basetemp ${CMAKE_CURRENT_BINARY_DIR}/server_store)
endif()
if(GRADWIRE_FUZZ)
  add_executable(fuzz_server server/fuzz_server.cc)
  target_include_directories(fuzz_server PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(fuzz_server PRIVATE gradwire_server xxHash::xxHash nlohmann_json::nlohmann_json)
  target_link_options(fuzz_server PRIVATE -fsanitize=fuzzer)
  file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/corpus_server)
  add_test(NAME fuzz_server COMMAND fuzz_server -seed=1 -max_total_time=30 -max_len=4096 -timeout=60
           -rss_limit_mb=2048 -verbosity=0
           -print_final_stats=1 -artifact_prefix=${CMAKE_BINARY_DIR}/ ${CMAKE_BINARY_DIR}/corpus_server)
  set_tests_properties(fuzz_server PROPERTIES TIMEOUT 300 LABELS fuzz)
endif()
