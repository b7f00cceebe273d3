// All kernels, compiled once for each instruction-set variant, each in a namespace of its own.
#include <cstdint>
#include <utility>
#if defined(_OPENMP)
#include <omp.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "kernels.hpp"

// Registers hold an array only where every loop over it is unrolled.
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

namespace SUBQUAD_VARIANT {

constexpr int MAX_THREADS = 1024;
constexpr int64_t BAD_LIST = -1;  // returned instead of the workspace's bytes: a list names what is not there

#include "simd.hpp"
#include "gemm.hpp"
#include "rows.hpp"
#include "arena.hpp"
#include "parallel.hpp"
#include "positions.hpp"
#include "select.hpp"
#include "hash.hpp"
#include "kmeans.hpp"
#include "grouping.hpp"
#include "centroids.hpp"
#include "members.hpp"
#include "forward.hpp"
#include "backward.hpp"
#include "bucket_lists.hpp"
#include "bucket_scores.hpp"
#include "bucket_top.hpp"
#include "bucket_blocks.hpp"
#include "bucket_forward.hpp"
#include "bucket_backward.hpp"
#include "single.hpp"
#include "feature_state.hpp"
#include "feature_ranges.hpp"
#include "feature_scan.hpp"
#include "feature_forward.hpp"
#include "feature_backward.hpp"
#include "causal_product.hpp"

template <class Arguments, class Run>
static int64_t by_dtype(const Arguments &a, Run &&run) {
  switch (a.sizes.dtype) {
    case BFLOAT16: return run(bf16{});
    case FLOAT16: return run(f16{});
    default: return run(float{});
  }
}

static int64_t hash(const Hashing &a) {
  return by_dtype(a, [&](auto x) { return hash_of<decltype(x)>(a); });
}
static int64_t forward(const Forward &a) {
  return by_dtype(a, [&](auto x) { return forward_of<decltype(x)>(a); });
}
static int64_t backward(const Backward &a) {
  return by_dtype(a, [&](auto x) { return backward_of<decltype(x)>(a); });
}

}  // namespace SUBQUAD_VARIANT

#define JOIN(a, b) a##b
#define TABLE(variant) JOIN(kernels_, variant)
extern const Kernels TABLE(SUBQUAD_VARIANT);
const Kernels TABLE(SUBQUAD_VARIANT) = {SUBQUAD_VARIANT::hash, SUBQUAD_VARIANT::kmeans_of, SUBQUAD_VARIANT::forward,
                                        SUBQUAD_VARIANT::backward, SUBQUAD_VARIANT::bucket_forward,
                                        SUBQUAD_VARIANT::bucket_backward, SUBQUAD_VARIANT::top_of,
                                        SUBQUAD_VARIANT::blocks_of, SUBQUAD_VARIANT::feature_forward,
                                        SUBQUAD_VARIANT::feature_backward, SUBQUAD_VARIANT::causal_product};
