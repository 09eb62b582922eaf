# llama.cpp's helpers for its own programs: nothing here uses them, and they are 40 % of the build. The package forces
# the option on, which only a variable of this kind overrides.
set(LLAMA_BUILD_COMMON OFF)
