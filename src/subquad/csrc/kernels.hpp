// One table of kernels for each instruction-set variant. If an entry is empty, the next slower variant has it.
#pragma once
#include "arguments.hpp"

struct Kernels {
#define KERNEL(name, Arguments) int64_t (*name)(const Arguments &, void *workspace);
  KERNELS
#undef KERNEL
};
