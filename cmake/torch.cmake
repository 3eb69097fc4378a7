# SPDX-License-Identifier: Apache-2.0
# Finds libtorch where users have it: in the `torch` package of a Python. GRADWIRE_TORCH_PYTHON names that Python; else
# the virtual environment of tools/setup.sh and the python3 on the path are asked. Sets GRADWIRE_HAS_TORCH and makes the
# target gradwire_torch.
#
# The package's own CMake files are not used: they drag in the CUDA toolkit that torch was built with, by names that
# come and go.
set(GRADWIRE_TORCH_PYTHON "" CACHE STRING "A Python that has torch")
set(GRADWIRE_TORCH_STATE "no (no Python with torch found)")
set(candidates "${PROJECT_SOURCE_DIR}/build/venv/bin/python3" python3)
if(GRADWIRE_TORCH_PYTHON)  # the one that is named, or none
  set(candidates "${GRADWIRE_TORCH_PYTHON}")
endif()
foreach(python IN LISTS candidates)
  execute_process(
    COMMAND ${python} -c "import torch, os; print(os.path.dirname(torch.__file__), torch.__version__, int(torch.compiled_with_cxx11_abi()), sep=';')"
    OUTPUT_VARIABLE answer ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
  if(failed)
    continue()
  endif()
  list(GET answer 0 torch_home)
  list(GET answer 1 torch_version)
  list(GET answer 2 torch_abi)
  if(NOT torch_abi)
    set(GRADWIRE_TORCH_STATE "no (torch ${torch_version} was built with the old C++ ABI; 2.6 and newer have the new one)")
    continue()
  endif()
  set(torch_libraries "")
  set(torch_first "")
  foreach(name torch torch_cpu c10)
    list(APPEND torch_libraries ${torch_home}/lib/lib${name}.so)
  endforeach()
  if(EXISTS ${torch_home}/lib/libtorch_cuda.so)  # nobody calls it by name: it registers itself when it is loaded
    list(APPEND torch_libraries -Wl,--push-state,--no-as-needed ${torch_home}/lib/libtorch_cuda.so
      ${torch_home}/lib/libc10_cuda.so -Wl,--pop-state)
  endif()
  # One C++ library for us and for torch: some toolchains prefer a static one, and two copies in one process crash. It
  # comes before torch, whose wheels may export parts of an older one (std::filesystem in 2.11): ours would call them.
  # A toolchain that has only the static one for linking may still lie beside the shared one that torch loads.
  foreach(name libstdc++.so libstdc++.so.6)
    execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${name} OUTPUT_VARIABLE shared_library
      OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(IS_ABSOLUTE "${shared_library}" AND EXISTS "${shared_library}")
      set(torch_first -Wl,--push-state,--no-as-needed ${shared_library} -Wl,--pop-state)
      break()
    endif()
  endforeach()
  add_library(gradwire_torch INTERFACE)
  target_include_directories(gradwire_torch SYSTEM INTERFACE ${torch_home}/include
    ${torch_home}/include/torch/csrc/api/include)
  # Torch brings the headers of its own fmt, which come first, and no library of it.
  target_compile_definitions(gradwire_torch INTERFACE FMT_HEADER_ONLY=1)
  target_link_libraries(gradwire_torch INTERFACE ${torch_libraries})
  target_link_options(gradwire_torch INTERFACE ${torch_first} -Wl,--allow-shlib-undefined -Wl,-rpath,${torch_home}/lib)
  set(GRADWIRE_HAS_TORCH ON)
  set(GRADWIRE_TORCH_VERSION ${torch_version})
  set(GRADWIRE_TORCH_STATE "${torch_version} (${torch_home})")
  break()
endforeach()
