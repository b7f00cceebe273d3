// The rate of the kernels' dense products on one core, where everything is in the first-level cache: the arithmetic floor
// of benchmarks/kernels.py. From the repository's root, with the flags of the variant in CMakeLists.txt:
//
//     g++ -std=c++20 -O3 -march=native -mprefer-vector-width=512 benchmarks/products.cpp -o products && ./products
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define UNROLL _Pragma("GCC unroll 16")
namespace kernels {
#include "../src/subquad/csrc/simd.hpp"
#include "../src/subquad/csrc/gemm.hpp"
}

int main() {
  constexpr int ROWS = 60, COLUMNS = 64, DEPTH = 64, REPEATS = 200000;
  std::vector<float> a(ROWS * DEPTH, 1.0f), b(DEPTH * COLUMNS, 1.0f), c(ROWS * COLUMNS, 0.0f);
  double best = 0;
  for (int trial = 0; trial < 5; trial++) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < REPEATS; i++)
      kernels::gemm(ROWS, COLUMNS, DEPTH, a.data(), DEPTH, 1, b.data(), COLUMNS, c.data(), COLUMNS, true);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const double rate = 2e-9 * ROWS * COLUMNS * DEPTH * REPEATS / seconds;
    best = rate > best ? rate : best;
  }
  std::printf("%.0f GFLOP/s on one core (%g)\n", best, (double)c[0]);
}
