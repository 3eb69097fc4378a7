# SPDX-License-Identifier: Apache-2.0
# The parameter server on a real network and in real processes; included by CMakeLists.txt, after `pytest` is set where
# there is one. The label `grpc` is for the tsan tree: `make test-long` builds and runs this test there. `make test`
# does not, as the same hub and client are tested without a network in server_test.
if(TARGET gradwire_rpc)
  gradwire_test(server/server_rpc_test LINK gradwire_rpc TIMEOUT 900 LABELS grpc)
  if(GRADWIRE_SANITIZE MATCHES thread)
    # Two tests send or hold so much that their time limits do not fit a program that is ten times slower.
    set_tests_properties(server_rpc_test PROPERTIES TIMEOUT 3600 ENVIRONMENT
      "TSAN_OPTIONS=ignore_noninstrumented_modules=1:suppressions=${CMAKE_CURRENT_SOURCE_DIR}/server/tsan_grpc.supp;GTEST_FILTER=-*Oversize*:*Thousand*")
  endif()
  if(DEFINED pytest)
    gradwire_script(server_hostile_test server/test_server_hostile.py ${pytest}/server_hostile)
    gradwire_script(server_soak_test server/test_server_soak.py ${pytest}/server_soak)
    set_tests_properties(server_soak_test PROPERTIES LABELS long TIMEOUT 7200)
  endif()
  if(DEFINED pytest AND GRADWIRE_HAS_TORCH)
    gradwire_script(server_program_test server/test_server.py ${pytest}/server)
  endif()
endif()
