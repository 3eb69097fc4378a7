# SPDX-License-Identifier: Apache-2.0
# Tests of watching the server; included by CMakeLists.txt, after `pytest` is set where there is one.
gradwire_test(server/watch_test THREADS TIMEOUT 900 LINK gradwire_watch)
gradwire_test(server/watch_fixture PROGRAM_ONLY LINK gradwire_watch)
if(DEFINED pytest)
  gradwire_script(watch_page_test server/test_watch_page.py ${pytest}/watch_page)
  if(TEST watch_page_test)
    set_property(TEST watch_page_test APPEND PROPERTY ENVIRONMENT "WATCH_FIXTURE=$<TARGET_FILE:watch_fixture>")
  endif()
endif()
