# SPDX-License-Identifier: Apache-2.0
# The server's store on disk: C++ tests, the same files seen from Python (the rest of tests/CMakeLists.txt decides
# whether there is one: include this after it).
find_package(nlohmann_json REQUIRED)
gradwire_test(server/server_store_test SOURCES server/server_store_test.cc server/server_store_faults_test.cc
              LINK gradwire_server nlohmann_json::nlohmann_json)
gradwire_test(server/store_tool PROGRAM_ONLY LINK gradwire_server nlohmann_json::nlohmann_json)
if(python_ready EQUAL 0)
  gradwire_script(server_store_python_test server/test_server_store.py
    ${Python3_EXECUTABLE} -m pytest -q -p no:cacheprovider --basetemp ${CMAKE_CURRENT_BINARY_DIR}/server_store)
endif()
