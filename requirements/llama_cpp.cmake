# What `make` changes in llama-cpp-python's build; CMake reads this file after each project() of it.

# llama.cpp's helpers for its own programs: nothing here uses them, and they are 40 % of the build. The package forces
# the option on, which only a variable of this kind overrides.
set(LLAMA_BUILD_COMMON OFF)

# ggml's default is -march=native. On a CPU with AMX that is tile code, which gcc 12.2 miscompiles (its _tile_loadconfig
# declares 8 of the 64 bytes that it reads, until GCC 13.2): Q4_0 and Q4_1 crash. And what was built on one machine
# dies on an older one. So the CPU's library is built twice, for x86-64-v3 (AVX2; Haswell and Zen, and all since) and
# with AVX-512 in glibc-hwcaps/x86-64-v4, where glibc 2.33 and newer look first on a CPU that has it. Two cores of an
# AMD EPYC with AVX-512, prefill over that of -march=native: AVX2 alone 0.53 for Q4_0, 0.84 for Q8_0, 0.70 for F16; both
# libraries 0.93, 0.93 and 1.02, with its logits to the last digit, since VNNI, BF16 and VBMI change none.
# A builder without AVX2 has no AMX either, and keeps -march=native.
set(V3 -DGGML_NATIVE=OFF)
foreach (feature SSE42 AVX AVX2 BMI2 FMA F16C)
    list(APPEND V3 -DGGML_${feature}=ON)
endforeach ()
set(HAS_V3 "")
if (CMAKE_SYSTEM_NAME STREQUAL "Linux" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    file(STRINGS /proc/cpuinfo HAS_V3 REGEX "^flags.* avx2" LIMIT_COUNT 1)
endif ()
if (HAS_V3)
    foreach (definition ${V3})
        string(REGEX MATCH "^-D(.*)=(.*)$" _ ${definition})
        set(${CMAKE_MATCH_1} ${CMAKE_MATCH_2})
    endforeach ()
    if (NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND CMAKE_VERSION VERSION_GREATER_EQUAL 3.24)
        set(CMAKE_CUDA_ARCHITECTURES native) # as with GGML_NATIVE; else the build is for every GPU since 2014
    endif ()
    if (PROJECT_NAME STREQUAL "llama_cpp")
        include(ExternalProject)
        ExternalProject_Add(x86-64-v4
            SOURCE_DIR ${CMAKE_CURRENT_SOURCE_DIR}/vendor/llama.cpp
            BINARY_DIR ${CMAKE_CURRENT_BINARY_DIR}/x86-64-v4
            CMAKE_ARGS ${V3} -DGGML_AVX512=ON -DCMAKE_BUILD_TYPE=${CMAKE_BUILD_TYPE} -DBUILD_SHARED_LIBS=ON
                -DCMAKE_C_COMPILER=${CMAKE_C_COMPILER} -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}
                -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON -DCMAKE_INSTALL_RPATH=$ORIGIN/../.. -DCMAKE_SHARED_LINKER_FLAGS=-s
                -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
                -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF
            BUILD_COMMAND ${CMAKE_COMMAND} --build <BINARY_DIR> --target ggml-cpu
            INSTALL_COMMAND ${CMAKE_COMMAND} -E copy bin/libggml-cpu.so.0 copied/libggml-cpu.so.0) # no symbolic link
        install(FILES ${CMAKE_CURRENT_BINARY_DIR}/x86-64-v4/copied/libggml-cpu.so.0
            DESTINATION ${SKBUILD_PLATLIB_DIR}/llama_cpp/lib/glibc-hwcaps/x86-64-v4)
    endif ()
endif ()
