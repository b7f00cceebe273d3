// One table of kernels for each instruction-set variant.
#pragma once
#include "arguments.hpp"

struct Kernels {
  int64_t (*hash)(const Hashing &);  // each returns the bytes of workspace that it needs; with a workspace, it runs
  int64_t (*kmeans)(const Clustering &);
  int64_t (*forward)(const Forward &);
  int64_t (*backward)(const Backward &);
  int64_t (*bucket_forward)(const BucketForward &);
  int64_t (*bucket_backward)(const BucketBackward &);
  int64_t (*bucket_top)(const Selecting &);
  int64_t (*bucket_blocks)(const Blocking &);
  int64_t (*feature_forward)(const FeatureForward &);
  int64_t (*feature_backward)(const FeatureBackward &);
  int64_t (*causal_product)(const CausalProduct &);
};
