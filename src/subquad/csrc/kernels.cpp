// All kernels, compiled once for each instruction-set variant, each in a namespace of its own.
#include <cstdint>
#include <type_traits>
#include <utility>
#if defined(_OPENMP)
#include <omp.h>
#include <sched.h>
#elif defined(SUBQUAD_DISPATCH)
#include <dispatch/dispatch.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
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
#include "amx.hpp"
#include "gemm.hpp"
#include "rows.hpp"
#include "arena.hpp"
#include "parallel.hpp"
#include "positions.hpp"
#include "pairs.hpp"
#include "select.hpp"
#include "hash.hpp"
#include "kmeans.hpp"
#include "grouping.hpp"
#include "centroids.hpp"
#include "members.hpp"
#include "clustered_forward.hpp"
#include "clustered_backward.hpp"
#include "bucket_lists.hpp"
#include "bucket_scores.hpp"
#include "bucket_top.hpp"
#include "bucket_blocks.hpp"
#include "bucket_forward.hpp"
#include "bucket_backward.hpp"
#include "hash_and_kmeans.hpp"
#include "feature_state.hpp"
#include "feature_ranges.hpp"
#include "feature_scan.hpp"
#include "feature_forward.hpp"
#include "feature_backward.hpp"
#include "causal_product.hpp"
#include "query_clusters.hpp"
#include "nearest_clusters.hpp"
#include "key_cells.hpp"
#include "tail_window.hpp"
#include "tail_forward.hpp"
#include "tail_window_backward.hpp"
#include "tail_backward.hpp"
#include "ranks.hpp"
#include "listed.hpp"
#include "exact_masks.hpp"
#include "exact_amx.hpp"
#include "exact_forward.hpp"
#include "exact_backward.hpp"
#include "steps.hpp"
#include "merging.hpp"

}  // namespace SUBQUAD_VARIANT

#define JOIN(a, b) a##b
#define TABLE(variant) JOIN(kernels_, variant)
extern const Kernels TABLE(SUBQUAD_VARIANT);
#define KERNEL(name, Arguments) .name = SUBQUAD_VARIANT::name,
#if defined(SUBQUAD_OWN)  // the build's list, KERNEL(name, ) …: the functions of all others are not compiled
const Kernels TABLE(SUBQUAD_VARIANT) = {SUBQUAD_OWN};
#else
const Kernels TABLE(SUBQUAD_VARIANT) = {KERNELS};
#endif
#undef KERNEL
