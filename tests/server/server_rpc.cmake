# SPDX-License-Identifier: Apache-2.0
# The parameter server on a real network and in real processes; included by CMakeLists.txt, after `pytest` is set where
# there is one. gRPC is not made for ThreadSanitizer: the same hub and client are tested without it in server_test.
if(TARGET gradwire_rpc)
  gradwire_test(server/server_rpc_test LINK gradwire_rpc TIMEOUT 900)
  if(DEFINED pytest)
    gradwire_script(server_hostile_test server/test_server_hostile.py ${pytest}/server_hostile)
    gradwire_script(server_soak_test server/test_server_soak.py ${pytest}/server_soak)
    set_tests_properties(server_soak_test PROPERTIES LABELS long TIMEOUT 7200)
  endif()
  if(DEFINED pytest AND GRADWIRE_HAS_TORCH)
    gradwire_script(server_program_test server/test_server.py ${pytest}/server)
  endif()
endif()
