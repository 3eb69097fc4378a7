# SPDX-License-Identifier: Apache-2.0
# Files as part of a program. gradwire_embed(target NAMESPACE space name=file ...) gives the target, for every pair, a
# `const std::string_view name` with the file's bytes, made again when the file changes. The script half of this file,
# run by cmake -P at build time, writes the source; nothing but CMake is needed. A file of "" becomes an empty view.
if(CMAKE_SCRIPT_MODE_FILE)
  set(text "// Made from ${INPUT} by cmake/embed.cmake.\n#include <string_view>\n")
  if(INPUT STREQUAL "")
    string(APPEND text "namespace ${SPACE} {\nextern const std::string_view ${NAME};\n"
                       "constinit const std::string_view ${NAME};\n}\n")
  else()
    file(READ ${INPUT} bytes HEX)
    string(REGEX REPLACE "(................................)" "\\1\n" bytes "${bytes}")
    string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
    string(APPEND text "namespace ${SPACE} {\nstatic constexpr unsigned char kBytes[] = {\n${bytes}0};\n"
                       "extern const std::string_view ${NAME};\n"
                       "const std::string_view ${NAME}(reinterpret_cast<const char*>(kBytes), sizeof(kBytes) - 1);\n}\n")
  endif()
  file(WRITE ${OUTPUT} "${text}")
  return()
endif()

function(gradwire_embed target)
  cmake_parse_arguments(arg "" "NAMESPACE" "" ${ARGN})
  foreach(pair IN LISTS arg_UNPARSED_ARGUMENTS)
    string(REGEX MATCH "^([^=]+)=(.*)$" matched "${pair}")
    set(name ${CMAKE_MATCH_1})
    set(input "${CMAKE_MATCH_2}")
    set(output ${CMAKE_CURRENT_BINARY_DIR}/embedded_${name}.cc)
    add_custom_command(OUTPUT ${output}
      COMMAND ${CMAKE_COMMAND} -DINPUT=${input} -DOUTPUT=${output} -DNAME=${name} -DSPACE=${arg_NAMESPACE}
              -P ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
      DEPENDS ${input} ${PROJECT_SOURCE_DIR}/cmake/embed.cmake VERBATIM)
    target_sources(${target} PRIVATE ${output})
    set_source_files_properties(${output} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  endforeach()
endfunction()
