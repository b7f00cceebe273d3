// One table of kernels for each instruction-set variant.
#pragma once
#include "arguments.hpp"

struct Kernels {
#define KERNEL(name, Arguments) int64_t (*name)(const Arguments &, void *workspace);
  KERNELS
#undef KERNEL
};
