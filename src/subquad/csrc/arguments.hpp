// What crosses the C interface: plain data. Python packs it by the description of these structures that `abi.cpp` gives
// (see `layout.hpp`), so that it is written down here and nowhere else.
#pragma once
#include "layout.hpp"

// Axes as everywhere: B batch, H query heads, G key heads, N queries, M keys, D and E widths.

struct Hashing {
  int64_t B, H, N, D, bits;
  int64_t centre;  // whether to take the vectors less their mean
  Dtype dtype;
  int32_t threads;
  Rows x;
  const uint8_t *valid;     // (B,N), or null where all are
  const float *planes;  // (bits,D)
  int64_t *codes;       // (B,H,N) 64 bits each
};
DESCRIBE(Hashing, B, H, N, D, bits, centre, dtype, threads, x, valid, planes, codes)

struct Clustering {
  int64_t B, H, N, clusters, iterations, threads;
  const int64_t *codes;  // (B,H,N)
  const uint8_t *valid;      // (B,N), or null
  int64_t *labels;       // (B,H,N); `clusters` for padding
};
DESCRIBE(Clustering, B, H, N, clusters, iterations, threads, codes, valid, labels)

// Clustered attention (topk = 0) and improved clustered attention.
struct ClusteredInputs {
  int64_t B, H, G, N, M, D, E, clusters, topk;
  float scale;
  Dtype dtype;
  int64_t threads;
  Rows query, key, value;
  const uint8_t *query_valid, *key_valid;  // (B,N) and (B,M), or null
};
DESCRIBE(ClusteredInputs, B, H, G, N, M, D, E, clusters, topk, scale, dtype, threads, query, key, value, query_valid,
         key_valid)

// What the forward pass hands to the backward pass. Ranks number an item's valid keys.
struct Saved {
  int32_t *order;    // (B,H,N) positions of the valid queries, sorted by cluster
  int32_t *offsets;  // (B,H,clusters + 1) where each cluster starts in `order`
  int32_t *top;      // (B,H,clusters,topk) ranks of the top keys, ascending
  float *centroids;  // (B,H,clusters,D)
  float *rest;       // (B,H,clusters,E) the centroids' attention to all but their top keys
  float *lse;        // (B,H,clusters) log-sum-exp of the centroids' logits
  float *mass;       // (B,H,clusters) the weight of the top keys
  float *residual;   // (B,H,clusters) what rounding took from `lse`
};
DESCRIBE(Saved, order, offsets, top, centroids, rest, lse, mass, residual)

struct ClusteredForward {
  ClusteredInputs inputs;
  int64_t bits, iterations;
  const float *planes;    // (bits,D), or null where there are labels
  const int64_t *labels;  // (B,H,N) the clusters of valid queries, or null: they are found here
  RowsOut out;
  Saved saved;
  float *query_lse;  // (B,H,N), or null where nobody wants it
};
DESCRIBE(ClusteredForward, inputs, bits, iterations, planes, labels, out, saved, query_lse)

struct ClusteredBackward {
  ClusteredInputs inputs;
  Saved saved;
  Rows grad_out;          // null where nobody reads `out`
  const float *grad_lse;  // (B,H,N), or null where nobody reads `query_lse`
  RowsOut grad_query, grad_key, grad_value;
};
DESCRIBE(ClusteredBackward, inputs, saved, grad_out, grad_lse, grad_query, grad_key, grad_value)

// Blocks of queries and the buckets of keys that they meet. A slot holds a token's number, or any other number: empty.
struct BucketSet {
  int64_t blocks, query_slots;  // of a block
  int64_t buckets, key_slots;   // of a bucket
  const int64_t *queries;       // (B,H,blocks,query_slots)
  const int64_t *keys;          // (B,H,buckets,key_slots)
  const int64_t *bucket;        // (B,H,blocks) the bucket of each block; null: block t meets bucket t
  int64_t span;   // queries and keys further apart do not meet; −1: however far
  int64_t first;  // the number of bucket 0 among those of all sets; an earlier set's where keys and span are the same
};
DESCRIBE(BucketSet, blocks, query_slots, buckets, key_slots, queries, keys, bucket, span, first)

struct BucketInputs {
  int64_t B, H, G, N, M, D, E, threads;
  float scale;
  Rows query, key, value;
  const float *key_bias;  // (B,H,M), or null
  List<BucketSet> sets;
  // Which keys a query sees by their numbers: query i is at i + offset among them.
  int64_t causal, other_keys_only, offset;
  const int64_t *offsets;  // (B), or null where all have `offset`
  const uint8_t *hidden;      // (B,H,hidden_rows,M), or null: query i does not see keys marked in row i mod hidden_rows
  int64_t hidden_rows;
  // Added to the logits by distance, (B,H,distance_rows,distances), or null: of sets with a span. The first is that of
  // the key `span` before the query. One row is for all queries.
  Rows of_distance;
  int64_t distance_rows, distances;
};
DESCRIBE(BucketInputs, B, H, G, N, M, D, E, threads, scale, query, key, value, key_bias, sets, causal, other_keys_only,
         offset, offsets, hidden, hidden_rows, of_distance, distance_rows, distances)

struct BucketForward {
  BucketInputs inputs;
  RowsOut out;
  float *lse, *residual;  // (B,H,N); what rounding took from `lse`
};
DESCRIBE(BucketForward, inputs, out, lse, residual)

struct BucketBackward {
  BucketInputs inputs;
  Rows out, grad_out;           // grad_out: null where nobody reads `out`
  const float *lse, *residual, *grad_lse;  // (B,H,N); grad_lse: null where nobody reads `lse`
  RowsOut grad_query, grad_key, grad_value;
  float *grad_key_bias;      // (B,H,M), or null
  RowsOut grad_of_distance;  // where there is `of_distance`
};
DESCRIBE(BucketBackward, inputs, out, grad_out, lse, residual, grad_lse, grad_query, grad_key, grad_value,
         grad_key_bias, grad_of_distance)

struct HashLayer {
  int64_t in, out;
  const float *weight, *bias;  // (heads,in,out), (heads,out)
};
DESCRIBE(HashLayer, in, out, weight, bias)

// A hash function of some vectors: layers with ReLUs between.
struct HashTerm {
  Rows x;
  int64_t heads;
  List<HashLayer> layers;
};
DESCRIBE(HashTerm, x, heads, layers)

struct Selecting {
  int64_t B, H, N, buckets, slots;  // of a bucket
  int64_t threads;
  Rows scores;           // (B,H,N,buckets), where there are no terms
  List<HashTerm> terms;  // scores are their sum, of vectors times `root`
  float root;
  const uint8_t *valid;       // (B,N), or null
  const int64_t *wanted;  // (B) tokens of each bucket
  int64_t odds;           // whether scores are logits, and tokens are ranked by their softmax
  int64_t *tokens;        // (B,H,buckets,slots), ascending; N where a slot is empty
  int64_t *best;          // (B,H,N) the bucket that a token scores highest
};
DESCRIBE(Selecting, B, H, N, buckets, slots, threads, scores, terms, root, valid, wanted, odds, tokens, best)

struct Blocking {
  int64_t B, H, N, buckets, slots;  // of a block
  int64_t threads;
  const int64_t *labels;  // (B,H,N); `buckets` for none
  int64_t *tokens;        // (B,H,blocks,slots) with ⌈N/slots⌉ + buckets blocks; N where a slot is empty
  int64_t *bucket;        // (B,H,blocks)
  int64_t *used;          // (B,H) blocks that hold tokens
};
DESCRIBE(Blocking, B, H, N, buckets, slots, threads, labels, tokens, bucket, used)

// Weights Σ_r e^{x_ir + y_jr} over the features r.
struct FeatureInputs {
  int64_t B, H, G, N, M, E, features, query_width, key_width, threads;
  Rows query, key, value;
  const float *of_query, *of_key;  // (heads or 1,features,width′) with rows of whole PITCHes, or null: rows are exponents
  const float *feature_bias;       // (H or 1,features), or null
  const float *key_bias;           // (B,G or 1,M), or null
  int64_t of_query_head, of_key_head, feature_bias_head;  // from one head to the next; 0 where one serves all
  int64_t key_bias_batch, key_bias_head;
  int64_t block, lag;  // block 0: every query sees every key; lag 0: causal
};
DESCRIBE(FeatureInputs, B, H, G, N, M, E, features, query_width, key_width, threads, query, key, value, of_query,
         of_key, feature_bias, key_bias, of_query_head, of_key_head, feature_bias_head, key_bias_batch, key_bias_head,
         block, lag)

struct FeatureForward {
  FeatureInputs inputs;
  RowsOut out;
  float *lse, *residual;  // (B,H,N); what rounding took from `lse`
};
DESCRIBE(FeatureForward, inputs, out, lse, residual)

struct FeatureBackward {
  FeatureInputs inputs;
  Rows out, grad_out;           // grad_out: null where nobody reads `out`
  const float *lse, *residual, *grad_lse;  // (B,H,N); grad_lse: null where nobody reads `lse`
  RowsOut grad_query, grad_key, grad_value;
  float *grad_key_bias;  // (B,G,M), or null
};
DESCRIBE(FeatureBackward, inputs, out, grad_out, lse, residual, grad_lse, grad_query, grad_key, grad_value, grad_key_bias)

struct CausalProduct {
  int64_t B, H, G, N, D, E, threads;  // products of rows that are D wide; one of H and G divides the other
  int64_t reverse;                    // over i ≥ t
  Rows query, key, value;
  RowsOut out;
};
DESCRIBE(CausalProduct, B, H, G, N, D, E, threads, reverse, query, key, value, out)

struct QueryClusters {
  int64_t B, H, G, N, M, D, clusters, bits, iterations, refine;
  int64_t logits;  // whether by their logits, or by the vectors themselves
  int64_t threads;
  Dtype dtype;
  Rows query, key;
  const uint8_t *query_valid, *key_valid;  // (B,N) and (B,M), or null
  const int64_t *counts;              // (B) how many clusters each item has; null: `clusters`
  const float *planes;                // (bits,D)
  int64_t *labels;                    // (B,H,N); `clusters` for padding
};
DESCRIBE(QueryClusters, B, H, G, N, M, D, clusters, bits, iterations, refine, logits, threads, dtype, query, key,
         query_valid, key_valid, counts, planes, labels)

// Which of some means each query is nearest to, in the space of the logits.
struct NearestMeans {
  int64_t B, H, G, N, M, D, clusters, threads;
  Dtype dtype;
  Rows query, key;
  const float *means;                       // (B,H,clusters,D)
  const int64_t *sizes;                     // (B,H,clusters) members of each cluster: one without any is nobody's nearest
  const uint8_t *query_valid, *key_valid;   // (B,N) and (B,M), or null
  int64_t *labels;                          // (B,H,N); `clusters` for padding, and where no cluster has members
};
DESCRIBE(NearestMeans, B, H, G, N, M, D, clusters, threads, dtype, query, key, means, sizes, query_valid, key_valid, labels)

struct KeyCells {
  int64_t B, G, M, D, E, cells, bits, iterations, threads;
  Dtype dtype;
  Rows key, value;
  const uint8_t *valid;    // (B,M), or null
  const float *planes;  // (bits,D + E)
  int64_t *labels;      // (B,G,M); `cells` for padding
};
DESCRIBE(KeyCells, B, G, M, D, E, cells, bits, iterations, threads, dtype, key, value, valid, planes, labels)

// Attention to a cluster's exact keys and a tail of cells.
struct TailInputs {
  int64_t B, H, G, N, M, D, E, clusters, topk, cells, window, threads;  // window 0: no near keys
  float scale;
  Dtype dtype;
  Rows query, key, value;
  const int64_t *labels;  // (B,H,N) the cluster of each query; `clusters` for none
  const int64_t *cell;    // (B,G,M) the cell of each key; `cells` for none
  const int64_t *start;   // (B) position of the first query among the keys; null: at the first one
};
DESCRIBE(TailInputs, B, H, G, N, M, D, E, clusters, topk, cells, window, threads, scale, dtype, query, key, value, labels,
         cell, start)

struct TailSaved {
  int32_t *order;         // (B,H,N) positions of the queries that are in a cluster, sorted by it
  int32_t *offsets;       // (B,H,clusters + 1) where each cluster starts in `order`
  int32_t *key_order;     // (B,G,M) positions of the keys that are in a cell, sorted by it
  int32_t *cell_offsets;  // (B,G,cells + 1) where each cell starts in `key_order`
  int32_t *top;           // (B,H,clusters,topk) places in `key_order` of the exact keys, ascending, −1 behind the last
  float *centroids;       // (B,H,clusters,D)
  float *cell_keys;       // (B,H,clusters,cells,D) k̄; null where nobody wants the cells
  float *cell_values;     // (B,H,clusters,cells,E) v̄
  float *cell_lse;        // (B,H,clusters,cells) ln Σ e^{scale·q̄·k}; −∞ for a cell without keys that are not exact
  float *cell_residual;   // (B,H,clusters,cells) what rounding took from `cell_lse`
  // With a window; null where nobody wants them.
  float *shifts;    // (B,H,N,cells) scale·(q − q̄)·k̄
  float *kept;      // (B,H,N) 0 where the cells are left out, since all of their keys are near; 1 elsewhere
  float *residual;  // (B,H,N) what rounding took from a query's log-sum-exp
};
DESCRIBE(TailSaved, order, offsets, key_order, cell_offsets, top, centroids, cell_keys, cell_values, cell_lse,
         cell_residual, shifts, kept, residual)

struct TailForward {
  TailInputs inputs;
  const int64_t *keys;  // (B,H,clusters,topk) the exact keys, any other number: empty; null: those with the largest logits
  const int64_t *wanted;  // (B) how many of these each item takes; null: `topk`
  const float *terms;  // (B,H,M) what is added to logits to choose the exact keys; null: made of these queries and keys
  const float *means;   // (B,H,clusters,D) the means of the clusters; null: those of their queries
  const float *around;  // (B,H,D,D) the covariance of queries inside clusters; null: that of these queries
  RowsOut out;
  float *lse;  // (B,H,N)
  TailSaved saved;
};
DESCRIBE(TailForward, inputs, keys, wanted, terms, means, around, out, lse, saved)

struct TailBackward {
  TailInputs inputs;
  TailSaved saved;
  Rows out;               // with a window what the forward pass gave
  const float *lse;       // (B,H,N) likewise
  Rows grad_out;          // null where nobody reads `out`
  const float *grad_lse;  // (B,H,N); null where nobody reads `lse`
  // As `cell_keys`, `cell_values` and `cell_lse`; null where nobody else reads these.
  const float *grad_cell_keys, *grad_cell_values, *grad_cell_lse;
  RowsOut grad_query, grad_key, grad_value;
  float *grad_means;  // (B,H,clusters,D); null where the means are those of the queries, which share their gradient
};
DESCRIBE(TailBackward, inputs, saved, out, lse, grad_out, grad_lse, grad_cell_keys, grad_cell_values, grad_cell_lse,
         grad_query, grad_key, grad_value, grad_means)

// What follows serves clusters that hold tokens of several ranks; see `ranks.hpp`.
struct Moments {
  int64_t B, H, N, D, threads;
  Dtype dtype;
  Rows x;
  const uint8_t *valid;  // (B,N), or null
  double *mean;         // (B,H,D)
  double *squares;      // (B,H) the sum of the squared distances to the mean, or null where nobody wants it
};
DESCRIBE(Moments, B, H, N, D, threads, dtype, x, valid, mean, squares)

struct CodedTerm {
  int64_t width;
  Rows x;
  const double *mean, *factor;  // (B,H,width), (B,H)
};
DESCRIBE(CodedTerm, width, x, mean, factor)

struct Coding {
  int64_t B, H, N, bits, threads;
  Dtype dtype;
  List<CodedTerm> terms;
  const float *planes;  // (bits,widths), or such planes of each head
  int64_t planes_head;  // from one head's to the next; 0 where all have the same
  const uint8_t *valid;  // (B,N), or null
  int64_t *codes;       // (B,H,N)
};
DESCRIBE(Coding, B, H, N, bits, threads, dtype, terms, planes, planes_head, valid, codes)

struct CodeAssignment {
  int64_t B, H, N, clusters, threads;
  const int64_t *codes, *centroids;  // (B,H,N), (B,H,clusters)
  const uint8_t *valid;               // (B,N), or null
  int64_t *labels;                   // (B,H,N); `clusters` for padding
  int32_t *votes;                    // (B,H,clusters,64) members with each bit; in bit 63 all members
};
DESCRIBE(CodeAssignment, B, H, N, clusters, threads, codes, centroids, valid, labels, votes)

struct MeanAssignment {
  int64_t B, H, N, D, clusters, threads;
  Dtype dtype;
  Rows x;
  const double *mean;               // (B,H,D)
  const float *directions, *halves;  // (B,H,D,clusters), (B,H,clusters)
  const uint8_t *valid;               // (B,N), or null
  int64_t *labels;                   // (B,H,N); `clusters` for padding
};
DESCRIBE(MeanAssignment, B, H, N, D, clusters, threads, dtype, x, mean, directions, halves, valid, labels)

struct GroupSums {
  int64_t B, H, N, D, groups, threads;
  Dtype dtype;
  Rows x;
  const int64_t *labels;  // (B,H,N)
  float *sums;            // (B,H,groups,D)
  int64_t *sizes;         // (B,H,groups) members
};
DESCRIBE(GroupSums, B, H, N, D, groups, threads, dtype, x, labels, sums, sizes)

// Attention of the members of each cluster to rows that the cluster alone lists.
struct ListedInputs {
  int64_t B, H, N, D, E, clusters, slots, rows, threads;
  float scale;
  Rows query, key, value;  // (B,H,N,D), (B,H,rows,D), (B,H,rows,E) in fp32
  const float *bias;       // (B,H,rows)
  const int64_t *labels;   // (B,H,N); any other number than a cluster's: in none
  const int64_t *lists;    // (B,H,clusters,slots) rows; any other number: an empty slot
};
DESCRIBE(ListedInputs, B, H, N, D, E, clusters, slots, rows, threads, scale, query, key, value, bias, labels, lists)

struct ListedForward {
  ListedInputs inputs;
  RowsOut out;
  float *lse;  // (B,H,N)
};
DESCRIBE(ListedForward, inputs, out, lse)

struct ListedBackward {
  ListedInputs inputs;
  Rows grad_out;          // null where nobody reads `out`
  const float *grad_lse;  // (B,H,N); null where nobody reads `lse`
  RowsOut grad_query, grad_key, grad_value;
  float *grad_bias;  // (B,H,rows)
};
DESCRIBE(ListedBackward, inputs, grad_out, grad_lse, grad_query, grad_key, grad_value, grad_bias)

// Exact attention; query i sees the keys up to i + offset if `causal`.
struct ExactInputs {
  int64_t B, H, G, N, M, D, E, causal, offset, threads;
  float scale;
  Dtype dtype;
  Rows query, key, value;
  const uint8_t *query_valid, *key_valid;  // (B,N) and (B,M), or null
};
DESCRIBE(ExactInputs, B, H, G, N, M, D, E, causal, offset, threads, scale, dtype, query, key, value, query_valid,
         key_valid)

struct ExactForward {
  ExactInputs inputs;
  RowsOut out;
  float *lse, *residual;  // (B,H,N); what rounding took from `lse`
};
DESCRIBE(ExactForward, inputs, out, lse, residual)

struct ExactBackward {
  ExactInputs inputs;
  Rows out, grad_out;                      // grad_out: null where nobody reads `out`
  const float *lse, *residual, *grad_lse;  // (B,H,N); grad_lse: null where nobody reads `lse`
  RowsOut grad_query, grad_key, grad_value;
};
DESCRIBE(ExactBackward, inputs, out, grad_out, lse, residual, grad_lse, grad_query, grad_key, grad_value)

// Exact attention of a few queries. Query i of item b is at i + offset + offsets[b] among the keys.
struct Steps {
  int64_t B, H, G, N, M, D, E, causal, offset, window, threads;  // window −1: however far
  float scale, softcap;                                          // softcap 0: none
  Dtype dtype;
  Rows query, key, value;
  const uint8_t *query_valid, *key_valid;  // (B,N) and (B,M), or null
  const int64_t *offsets;                  // (B), or null
  RowsOut out;
  float *lse;  // (B,H,N)
};
DESCRIBE(Steps, B, H, G, N, M, D, E, causal, offset, window, threads, scale, softcap, dtype, query, key, value,
         query_valid, key_valid, offsets, out, lse)

// A partial of each of `windows` windows of an item's queries. A window holds `queries` of them, from `first` on, and the
// next one begins `step` behind it.
struct MergedPart {
  int64_t first, queries, step, windows;
  Rows out;          // (B·windows,H,queries,E)
  const float *lse;  // (B·windows,H,queries)
};
DESCRIBE(MergedPart, first, queries, step, windows, out, lse)

struct Merging {
  int64_t B, H, N, E, threads;
  Dtype dtype;      // of the partials
  int64_t rounded;  // whether the output has this dtype, too; otherwise it is in fp32
  List<MergedPart> parts;
  RowsOut out;
  float *lse;   // (B,H,N)
};
DESCRIBE(Merging, B, H, N, E, threads, dtype, rounded, parts, out, lse)

// Each kernel, with its arguments: KERNEL(name, structure). It returns the bytes of workspace that it needs; with a
// workspace it runs, and returns BAD_LIST where a list of tokens among its arguments names one that is not there.
#define KERNELS                                  \
  KERNEL(hash, Hashing)                          \
  KERNEL(kmeans, Clustering)                     \
  KERNEL(clustered_forward, ClusteredForward)    \
  KERNEL(clustered_backward, ClusteredBackward)  \
  KERNEL(bucket_forward, BucketForward)          \
  KERNEL(bucket_backward, BucketBackward)        \
  KERNEL(bucket_top, Selecting)                  \
  KERNEL(bucket_blocks, Blocking)                \
  KERNEL(feature_forward, FeatureForward)        \
  KERNEL(feature_backward, FeatureBackward)      \
  KERNEL(causal_product, CausalProduct)          \
  KERNEL(query_clusters, QueryClusters)          \
  KERNEL(nearest_clusters, NearestMeans)         \
  KERNEL(key_cells, KeyCells)                    \
  KERNEL(tail_forward, TailForward)              \
  KERNEL(tail_backward, TailBackward)            \
  KERNEL(moments, Moments)                       \
  KERNEL(centred_codes, Coding)                  \
  KERNEL(assign_codes, CodeAssignment)           \
  KERNEL(assign_means, MeanAssignment)           \
  KERNEL(group_sums, GroupSums)                  \
  KERNEL(listed_forward, ListedForward)          \
  KERNEL(listed_backward, ListedBackward)        \
  KERNEL(exact_forward, ExactForward)            \
  KERNEL(exact_backward, ExactBackward)          \
  KERNEL(steps_forward, Steps)                   \
  KERNEL(merge_windows, Merging)
