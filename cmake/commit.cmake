# SPDX-License-Identifier: Apache-2.0
# commit.h with the commit of the source tree. The script half of this file runs in every build and writes the header
# only when the commit has changed, so that a commit compiles one small file again and no reconfiguration is needed.
if(CMAKE_SCRIPT_MODE_FILE)
  set(commit "")
  execute_process(COMMAND git describe --always --dirty --exclude=* WORKING_DIRECTORY ${SOURCE}
    OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(failed)
    set(commit "")  # a source archive, or a machine without git
  endif()
  file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#define GRADWIRE_COMMIT \"${commit}\"\n")
  return()
endif()

set(GRADWIRE_COMMIT_FOLDER ${CMAKE_CURRENT_BINARY_DIR}/commit)
add_custom_target(gradwire_commit BYPRODUCTS ${GRADWIRE_COMMIT_FOLDER}/commit.h
  COMMAND ${CMAKE_COMMAND} -DSOURCE=${PROJECT_SOURCE_DIR} -DOUTPUT=${GRADWIRE_COMMIT_FOLDER}/commit.h
          -P ${CMAKE_CURRENT_LIST_FILE})
