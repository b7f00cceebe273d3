// Attention of the centroids to all keys, with the selection of each centroid's top keys in the same pass.
//
// Keys are rows and centroids are lanes, so that neither keys nor values are transposed:
//
//              centroids, C′ lanes →
//             ┌──────────────────────┐
//     64 keys │  logits K·(Q^c)ᵀ     │  down each column: the running maximum and sum of the softmax, and the candidates
//        ↓    │  of a tile           │  for the centroid's top keys
//             └──────────────────────┘
//              its transpose × the keys' values → out (C′,E′)
//
// The C×M weights are never stored: a tile of them lives in the cache. The sum over the top keys is taken out of the sum
// over all keys at the end.

constexpr int64_t KEY_TILE = 64;
constexpr int64_t KEY_CHUNK = 4096;  // keys per task, fixed so that results do not depend on the threads

// What the chunks of keys give, each in a piece of its own: softmax sums relative to `highest`, and the best keys.
struct ChunkResults {
  Pieces<float> highest, total;  // (C)
  Pieces<float> out;             // (C,E') Σ e^{logit − highest} V
  Pieces<float> logits;          // (C,K) of the candidates
  Pieces<int32_t> ranks;         // (C,K)
  Pieces<int32_t> found;         // (C)
  int64_t chunks, width;         // width: E rounded up to whole vectors

  ChunkResults(Arena &arena, const ClusteredInputs &in) {
    chunks = (in.M + KEY_CHUNK - 1) / KEY_CHUNK;
    width = round_up(in.E, W);
    const int64_t all = in.B * in.H * chunks;
    highest = arena.take_each<float>(all, in.clusters);
    total = arena.take_each<float>(all, in.clusters);
    out = arena.take_each<float>(all, in.clusters * width);
    logits = arena.take_each<float>(all, in.clusters * in.topk);
    ranks = arena.take_each<int32_t>(all, in.clusters * in.topk);
    found = arena.take_each<int32_t>(all, in.clusters);
  }
};

struct CentroidScratch {
  float *queries;    // (D',C') scaled centroids, transposed
  float *rows;       // (C',D') for the transposition
  float *keys;       // (KEY_TILE,D)
  float *values;     // (KEY_TILE,E')
  float *tile;       // (KEY_TILE,C')
  float *highest, *total, *bound;  // (C')
  float *out;        // (C',E')
  Pieces<float> logits;     // a centroid: (room) of the candidates
  Pieces<int32_t> ranks;    // a centroid: (room)
  int64_t room;
  float *first;             // (room,C') the first tiles, kept to find a first bound
  int32_t *found, *numbers;

  // Room for the first keys to give a bound that few later ones pass, and for as many again as are kept.
  static int64_t room_for(int64_t K) {
    const int64_t first = 8 * K < 256 ? 8 * K : 256, least = 2 * K + KEY_TILE;
    return K ? round_up(first > least ? first : least, KEY_TILE) : 0;
  }

  CentroidScratch(Arena &arena, const ClusteredInputs &in) {
    const int64_t C = round_up(in.clusters, W), D = round_up(in.D, W), E = round_up(in.E, W);
    room = room_for(in.topk);
    queries = arena.take<float>(D * C);
    rows = arena.take<float>(D * C);
    keys = arena.take<float>(KEY_TILE * in.D);
    values = arena.take<float>(KEY_TILE * E);
    tile = arena.take<float>(KEY_TILE * C);
    highest = arena.take<float>(C);
    total = arena.take<float>(C);
    bound = arena.take<float>(C);
    out = arena.take<float>(C * E);
    logits = arena.take_each<float>(C, room);
    ranks = arena.take_each<int32_t>(C, room);
    found = arena.take<int32_t>(C);
    first = arena.take<float>(room * C);
    numbers = arena.take<int32_t>(room * W);
  }
};

// Centroids [first, first + count) as columns, times the scale.
static void pack_centroids(const float *centroids, int64_t count, int64_t width, float scale, float *rows, float *to) {
  const int64_t C = round_up(count, W), D = round_up(width, W);
  for (int64_t c = 0; c < C; c++)
    for (int64_t d = 0; d < D; d++) rows[c * D + d] = c < count && d < width ? centroids[c * width + d] * scale : 0;
  pack_transposed(rows, C, width, D, to, C);
}

template <class Candidates>
static void prune(const Candidates &own, int64_t c, int64_t K) {
  float kth;
  own.found[c] = (int32_t)keep_largest(own.logits[c], own.ranks[c], own.found[c], K, own.numbers, &kth);
  own.bound[c] = kth;
}

// Keys above the smallest logit that can still be among the top K join the candidates. A full list is pruned to its best
// K, whose smallest is the new bound: the further the keys have come, the fewer pass.
template <class Candidates>
static void take_best(const Candidates &own, const float *tile, int64_t columns, int64_t count, int64_t first_rank,
                      int64_t K) {
  for (int64_t v = 0; v < columns; v += W)
    for (int64_t i = 0; i < count; i++) {
      const float *logits = tile + i * columns + v;
      for (uint32_t better = bits_greater(load(logits), load(own.bound + v)); better; better &= better - 1) {
        const int lane = __builtin_ctz(better);
        const int64_t c = v + lane, at = own.found[c]++;
        own.logits[c][at] = logits[lane];
        own.ranks[c][at] = (int32_t)(first_rank + i);
        if (own.found[c] == own.room) prune(own, c, K);
      }
    }
}

// The first tiles, which would all pass, are kept until a bound for them can be found in one go. `seen`: keys of the chunk
// before this tile.
static void select_keys(const CentroidScratch &own, int64_t C, int64_t seen, int64_t count, bool last,
                        int64_t first_rank, int64_t K) {
  const int64_t columns = round_up(C, W), kept = own.room;
  if (seen >= kept) return take_best(own, own.tile, columns, count, first_rank + seen, K);
  for (int64_t i = 0; i < count * columns; i += W) store(own.first + seen * columns + i, load(own.tile + i));
  seen += count;
  if (seen < kept && !last) return;
  for (int64_t v = 0; v < columns; v += W) {
    vf bound = splat(-__builtin_inff());
    if (seen > K) bound = bound_of_columns(own.first + v, columns, seen, K, own.numbers);
    // Lanes behind the last centroid take nothing.
    for (int lane = 0; lane < W; lane++) own.bound[v + lane] = v + lane < C ? bound[lane] : __builtin_inff();
  }
  take_best(own, own.first, columns, seen, first_rank, K);
}

constexpr float LOWEST = -__FLT_MAX__;  // of the running maxima: against −∞, keys with logit −∞ would weigh NaN, not 0

// tile ← e^{tile − highest}, with the running maximum, sum and output brought to the new maximum.
static void online_softmax(const CentroidScratch &own, int64_t C, int64_t count, int64_t width) {
  const int64_t columns = round_up(C, W);
  for (int64_t v = 0; v < columns; v += W) {
    vf old = load(own.highest + v), high = old, total = load(own.total + v);
    for (int64_t i = 0; i < count; i++) high = maximum(load(own.tile + i * columns + v), high);
    if (bits_greater(high, old)) {  // rare after the first tiles
      vf shrink = exp_nonpositive(old - high);
      total *= shrink;
      for (int lane = 0; lane < W && v + lane < C; lane++) {
        if (shrink[lane] == 1.0f) continue;
        float *out = own.out + (v + lane) * width;
        for (int64_t e = 0; e < width; e += W) store(out + e, load(out + e) * shrink[lane]);
      }
      store(own.highest + v, high);
    }
    vf sums = {};
    for (int64_t i = 0; i < count; i++) {
      vf p = exp_nonpositive(load(own.tile + i * columns + v) - high);
      sums += p;
      store(own.tile + i * columns + v, p);
    }
    store(own.total + v, total + sums);
  }
}

// Centroids [first, last) of one head over one chunk of its keys.
template <class T>
static void attend_chunk(const ClusteredForward &a, const Positions &keys, int64_t b, int64_t h, int64_t chunk,
                         int64_t first, int64_t last, const CentroidScratch &own, const ChunkResults &results) {
  const ClusteredInputs &in = a.inputs;
  const int64_t C = last - first, columns = round_up(C, W), width = results.width, K = in.topk, g = h / (in.H / in.G);
  const int64_t end = (chunk + 1) * KEY_CHUNK < keys.count ? (chunk + 1) * KEY_CHUNK : keys.count;
  const float *centroids = a.saved.centroids + ((b * in.H + h) * in.clusters + first) * in.D;
  pack_centroids(centroids, C, in.D, in.scale, own.rows, own.queries);
  for (int64_t c = 0; c < columns; c++) {
    own.highest[c] = LOWEST;
    own.total[c] = 0;
    own.found[c] = 0;
  }
  zero(own.out, columns * width);
  for (int64_t rank = chunk * KEY_CHUNK; rank < end; rank += KEY_TILE) {
    const int64_t count = end - rank < KEY_TILE ? end - rank : KEY_TILE;
    pack_rows<T>(in.key, b, g, keys.at, rank, count, in.D, own.keys, in.D);
    pack_rows<T>(in.value, b, g, keys.at, rank, count, in.E, own.values, width);
    gemm(count, columns, in.D, own.keys, in.D, 1, own.queries, columns, own.tile, columns, false);
    const int64_t start = chunk * KEY_CHUNK;
    if (K) select_keys(own, C, rank - start, count, rank + count == end, start, K);
    online_softmax(own, C, count, width);
    // The tile is read transposed: its columns are the rows of the product.
    gemm(C, width, count, own.tile, 1, columns, own.values, width, own.out, width, true);
  }
  for (int64_t c = 0; c < C; c++) {
    const int64_t at = (b * in.H + h) * results.chunks + chunk, row = first + c;
    if (own.found[c] > K) prune(own, c, K);
    results.highest[at][row] = own.highest[c];
    results.total[at][row] = own.total[c];
    results.found[at][row] = own.found[c];
    for (int64_t e = 0; e < width; e++) results.out[at][row * width + e] = own.out[c * width + e];
    for (int64_t i = 0; i < own.found[c]; i++) {
      results.logits[at][row * K + i] = own.logits[c][i];
      results.ranks[at][row * K + i] = own.ranks[c][i];
    }
  }
}

struct MergeScratch {
  float *logits, *weights, *out, *of_top;
  int32_t *ranks, *numbers;

  MergeScratch(Arena &arena, const ClusteredInputs &in, const ChunkResults &results) {
    const int64_t all = results.chunks * in.topk + W;
    logits = arena.take<float>(all);
    weights = arena.take<float>(round_up(in.topk, W));
    ranks = arena.take<int32_t>(all);
    numbers = arena.take<int32_t>(all);
    out = arena.take<float>(results.width);
    of_top = arena.take<float>(results.width);
  }
};

struct Merged {
  float highest, total;
  int64_t found;
};

// If logits are NaN or −∞, fewer than K keys were found: the first of the other keys, with logit −∞, make up the number.
// Ranks stay ascending and distinct. Back to front, because a pair moves to its place or further back.
static void make_up(float *logits, int32_t *ranks, int64_t found, int64_t K) {
  for (int64_t at = K - 1, i = found - 1; at >= 0; at--) {
    const bool is_found = i >= 0 && ranks[i] >= at;  // else all ranks up to `at` are in the list
    logits[at] = is_found ? logits[i] : -__builtin_inff();
    ranks[at] = is_found ? ranks[i--] : (int32_t)at;
  }
}

// One centroid's chunks together: Σ e^{logit − highest} and Σ e^{logit − highest} V over all keys, and its top keys.
static Merged merge_chunks(const ClusteredForward &a, int64_t keys, int64_t row, const ChunkResults &results,
                           const MergeScratch &own) {
  const ClusteredInputs &in = a.inputs;
  const int64_t chunks = (keys + KEY_CHUNK - 1) / KEY_CHUNK, K = in.topk < keys ? in.topk : keys;
  Merged merged = {LOWEST, 0, 0};
  const int64_t first = row / in.clusters * results.chunks, c = row % in.clusters;
  for (int64_t at = first; at < first + chunks; at++)
    merged.highest = results.highest[at][c] > merged.highest ? results.highest[at][c] : merged.highest;
  zero(own.out, results.width);
  for (int64_t at = first; at < first + chunks; at++) {
    const float share = __builtin_expf(results.highest[at][c] - merged.highest);
    const float *out = results.out[at] + c * results.width;
    merged.total += share * results.total[at][c];
    for (int64_t e = 0; e < results.width; e++) own.out[e] += share * out[e];
    for (int64_t i = 0; i < results.found[at][c]; i++, merged.found++) {
      own.logits[merged.found] = results.logits[at][c * in.topk + i];
      own.ranks[merged.found] = results.ranks[at][c * in.topk + i];
    }
  }
  // Candidates are taken, pruned and put together in the order of the keys, so the top keys come out ascending.
  float kth;
  if (merged.found > K) merged.found = keep_largest(own.logits, own.ranks, merged.found, K, own.numbers, &kth);
  if (merged.found < K) make_up(own.logits, own.ranks, merged.found, K);
  merged.found = K;
  for (int64_t i = 0; i < in.topk; i++) a.saved.top[row * in.topk + i] = i < K ? own.ranks[i] : 0;
  return merged;
}

// The top keys' part of the sums is their mass; what is left is the attention to all other keys. `values` are the top
// keys' packed rows.
static void split_off_top(const ClusteredForward &a, int64_t row, const Merged &merged, const float *values,
                          int64_t width, const MergeScratch &own) {
  const ClusteredInputs &in = a.inputs;
  const int64_t lanes = round_up(merged.found, W);
  vf mass = {};
  for (int64_t i = merged.found; i < lanes; i++) own.logits[i] = -__builtin_inff();
  for (int64_t i = 0; i < lanes; i += W) {
    const vf p = exp_nonpositive(load(own.logits + i) - merged.highest);
    mass += p;
    store(own.weights + i, p);
  }
  gemm(1, width, merged.found, own.weights, lanes, 1, values, width, own.of_top, width, false);
  const float norm = 1 / merged.total;
  for (int64_t e = 0; e < in.E; e++) a.saved.rest[row * in.E + e] = (own.out[e] - own.of_top[e]) * norm;
  const float log_total = __builtin_logf(merged.total);
  a.saved.lse[row] = merged.highest + log_total;
  a.saved.residual[row] = residual_of(a.saved.lse[row], merged.highest, log_total);
  a.saved.mass[row] = sum(mass) * norm;
}

// A cluster without members, or without keys to attend to: nothing, and nothing to differentiate.
static void attend_nothing(const ClusteredForward &a, int64_t row) {
  const ClusteredInputs &in = a.inputs;
  for (int64_t i = 0; i < in.topk; i++) a.saved.top[row * in.topk + i] = (int32_t)i;
  for (int64_t e = 0; e < in.E; e++) a.saved.rest[row * in.E + e] = 0;
  a.saved.lse[row] = __builtin_inff();
  a.saved.residual[row] = 0;
  a.saved.mass[row] = 0;
}
