// What crosses the C interface: plain data, laid out alike for C++ and for ctypes (`subquad/ops/native/interface.py`).
#pragma once
#include <cstdint>

// Rows of contiguous floats, one for each (batch item, head, token); strides count elements.
struct Rows {
  void *data;
  int64_t batch, head, token;
};

enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// Axes as everywhere: B batch, H query heads, G key heads, N queries, M keys, D and E widths, C clusters, K top keys.
struct Sizes {
  int64_t B, H, G, N, M, D, E, C, K;
  int64_t iterations;
  int32_t dtype, threads;
};

struct Hashing {
  Sizes sizes;
  Rows query;
  const uint8_t *query_real;  // (B,N), or null where all are
  const float *planes;        // (bits, D)
  int64_t bits;
  int64_t centre;   // whether to take the vectors less their mean
  uint64_t *codes;  // (B,H,N)
  void *workspace;
};

struct Clustering {
  Sizes sizes;
  const uint64_t *codes;      // (B,H,N)
  const uint8_t *query_real;  // (B,N), or null
  int64_t *labels;            // (B,H,N); C for padding
  void *workspace;
};

// What the forward pass hands to the backward pass. Ranks number an item's real keys.
struct Saved {
  int32_t *order;    // (B,H,N) positions of the real queries, sorted by cluster
  int32_t *offsets;  // (B,H,C+1) where each cluster starts in `order`
  int32_t *top;      // (B,H,C,K) ranks of the top keys, ascending
  float *centroids;  // (B,H,C,D)
  float *rest;       // (B,H,C,E) the centroids' attention to all but their top keys
  float *lse;        // (B,H,C) log-sum-exp of the centroids' logits
  float *mass;       // (B,H,C) the weight of the top keys
};

struct Forward {
  Sizes sizes;
  Rows query, key, value, out;
  const uint8_t *query_real, *key_real;
  const float *planes;  // (bits, D)
  int64_t bits;
  float scale;
  Saved saved;
  void *workspace;
};

struct Backward {
  Sizes sizes;
  Rows query, key, value, grad_out, grad_query, grad_key, grad_value;
  const uint8_t *query_real, *key_real;
  float scale;
  Saved saved;
  void *workspace;
};

// Slots hold token numbers; one that holds no number of a token is empty.
struct BucketSet {
  const int64_t *queries;  // (B,H,T,S)
  const int64_t *keys;     // (B,H,C,K)
  const int64_t *bucket;   // (B,H,T) the bucket of each block; null: block t is bucket t
  int64_t T, S, C, K;
  int64_t span;   // queries and keys further apart do not meet; −1: however far
  int64_t first;  // the number of bucket 0 among those of all sets; an earlier set's where keys and span are the same
};

struct BucketSets {
  const BucketSet *sets;
  int64_t count;
};

// Which keys a query sees: query i stands at i + offset among them.
struct Pattern {
  int64_t causal, other_keys_only;
  int64_t offset;
  const int64_t *offsets;  // (B), or null where all have `offset`
  const uint8_t *hidden;   // (B,H,hidden_rows,M), or null: query i does not see keys marked in row i mod hidden_rows
  int64_t hidden_rows;
};

struct BucketForward {
  Sizes sizes;
  Rows query, key, value, out;
  const float *key_bias;  // (B,H,M), or null
  BucketSets buckets;
  Pattern pattern;
  float scale;
  float *lse;  // (B,H,N)
  void *workspace;
};

struct BucketBackward {
  Sizes sizes;
  Rows query, key, value, out, grad_out, grad_query, grad_key, grad_value;  // grad_out: null where nobody reads `out`
  const float *key_bias;
  BucketSets buckets;
  Pattern pattern;
  float scale;
  const float *lse, *grad_lse;  // (B,H,N); grad_lse: null where nobody reads `lse`
  float *grad_key_bias;         // (B,H,M), or null
  void *workspace;
};

struct HashLayer {
  const float *weight, *bias;  // (heads,in,out), (heads,out)
  int64_t in, out;
};

// A hash function of some vectors: layers with ReLUs between.
struct HashTerm {
  Rows x;
  int64_t heads;
  const HashLayer *layers;
  int64_t layer_count;
};

struct Selecting {
  Sizes sizes;            // C buckets of K slots
  Rows scores;            // (B,H,N,C), where there are no terms
  const HashTerm *terms;  // scores are their sum, of vectors times `root`
  int64_t term_count;
  float root;
  const uint8_t *real;    // (B,N), or null
  const int64_t *wanted;  // (B) tokens of each bucket
  int64_t odds;           // whether scores are logits, and tokens are ranked by their softmax
  int64_t *slots;         // (B,H,C,K)
  int64_t *best;          // (B,H,N) the bucket that a token scores highest
  void *workspace;
};

struct Blocking {
  Sizes sizes;            // C buckets, blocks of K slots
  const int64_t *labels;  // (B,H,N); C for none
  int64_t *tokens;        // (B,H,T,K) with T = ⌈N/K⌉ + C
  int64_t *bucket;        // (B,H,T)
  int64_t *used;          // (B,H) blocks that hold tokens
  void *workspace;
};

// Weights Σ_r e^{x_ir + y_jr}. There are sizes.C features; queries are D wide and keys K.
struct FeatureInputs {
  Rows query, key, value;
  const float *of_query, *of_key;  // (heads or 1,C,width′) with rows of whole PITCHes, or null: rows are exponents
  const float *feature_bias;       // (H or 1,C), or null
  const float *key_bias;           // (B,G or 1,M), or null
  int64_t of_query_head, of_key_head, feature_bias_head;
  int64_t key_bias_batch, key_bias_head;
  int64_t block, lag;  // block 0: every query sees every key; lag 0: causal
};

struct FeatureForward {
  Sizes sizes;
  FeatureInputs in;
  Rows out;
  float *lse;  // (B,H,N)
  void *workspace;
};

struct FeatureBackward {
  Sizes sizes;
  FeatureInputs in;
  Rows out, grad_out, grad_query, grad_key, grad_value;  // grad_out: null where nobody reads `out`
  const float *lse, *grad_lse;  // (B,H,N); grad_lse: null where nobody reads `lse`
  float *grad_key_bias;         // (B,G,M), or null
  void *workspace;
};

struct CausalProduct {
  Sizes sizes;  // D wide products; one of H and G divides the other
  Rows query, key, value, out;
  int64_t reverse;  // over i ≥ t
  void *workspace;
};
