# For `make native-arm64`: Debian's g++-aarch64-linux-gnu; tests of the result run under qemu-user where that is there.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
if(NOT CMAKE_CXX_COMPILER)
  set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
endif()
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
