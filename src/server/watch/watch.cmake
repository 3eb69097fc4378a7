# SPDX-License-Identifier: Apache-2.0
# Watching the server (watch.h) and `gradwire status` (status_text.h): works from the status object alone, so it needs
# neither gRPC nor the rest of this folder.
find_package(nlohmann_json REQUIRED)
find_package(Threads REQUIRED)
include(embed)
add_library(gradwire_watch STATIC
  ${CMAKE_CURRENT_LIST_DIR}/watch.cc ${CMAKE_CURRENT_LIST_DIR}/watch_http.cc
  ${CMAKE_CURRENT_LIST_DIR}/metrics.cc ${CMAKE_CURRENT_LIST_DIR}/status_text.cc)
target_include_directories(gradwire_watch PUBLIC ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
target_link_libraries(gradwire_watch PUBLIC nlohmann_json::nlohmann_json Threads::Threads PRIVATE ${GRADWIRE_FMT})
gradwire_embed(gradwire_watch NAMESPACE gradwire::server::embedded
  watch_page_html=${CMAKE_CURRENT_LIST_DIR}/page/page.html
  watch_page_css=${CMAKE_CURRENT_LIST_DIR}/page/page.css
  watch_page_js=${CMAKE_CURRENT_LIST_DIR}/page/page.js)
