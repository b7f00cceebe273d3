// Exact attention to keys near a query, in addition to its cluster's keys. For query i of cluster c, at position i + start:
//
//     near keys     j with |i + start − j| ≤ window, less the top keys of c
//     w_ij = e^{scale·q_i·k_j}                what such a key weighs
//     r_ij = e^{scale·q̄·k_j + u_ix}           what its cell x counts it as, with u_ix = scale·(q_i − q̄)·k̄_x
//     out_i = (T_i + R_i + Σ_j (w_ij − r_ij) v_j) / (t_i + ρ_i + Σ_j (w_ij − r_ij))
//
// T, t are the sums of values and weights over the top keys, R, ρ those over the cells: the members leave them here. Then
// tiles of queries that follow each other meet the one run of keys that their windows reach:
//
//                 keys, lanes →
//               ┌────────────────────┐
//     queries ↓ │ ▒▒▒▒▒▒▒▒▒          │   twice: Q·Kᵀ, and Q̄·Kᵀ with each query's mean in its place
//               │   ▒▒▒▒▒▒▒▒▒        │
//               │     ▒▒▒▒▒▒▒▒▒      │   lanes outside of a query's window are −∞
//               └────────────────────┘
//
// If all keys of the cells are near, ρ_i − Σ r_ij is the rounding of a 0: then the cells are left out.

constexpr int64_t NEAR_QUERIES = 30;                 // of a tile: whole blocks of a product
constexpr int64_t NEAR_RUN = 8 * NEAR_QUERIES;       // of a task
// Of ρ: what is left of it that is no more than this is rounding. Weights of pairs have errors of 3e-6, twice.
template <class Number>
constexpr float NEAR_ROUNDING = (__is_same(Number, Pair) ? 128 : 64) * 1.1920929e-7f;

// The keys of a wave's key heads in place, and values; 0 for a key in no cell.
struct NearKeys {
  Pieces<float> rows, across;            // (M,D'), and transposed (D,M')
  Pieces<float> values, values_across;   // (M,E'), (E,M'), the latter for the backward pass
  Pieces<int32_t> cell;                  // (M')
  int64_t lanes;                         // M', so that a vector may begin at any key

  NearKeys(Arena &arena, const TailInputs &in, int64_t heads, bool backward) {
    const int64_t M = in.window > 0 ? in.M : 0;
    lanes = round_up(M, W) + W;
    rows = arena.take_each<float>(heads, round_up(M, W) * round_up(in.D, W));
    across = arena.take_each<float>(heads, in.window > 0 ? in.D * lanes : 0);
    values = arena.take_each<float>(heads, round_up(M, W) * round_up(in.E, W));
    values_across = arena.take_each<float>(heads, in.window > 0 && backward ? in.E * lanes : 0);
    cell = arena.take_each<int32_t>(heads, in.window > 0 ? lanes : 0);
  }
};

// Words of a bit for each key, and one more, so that a vector's bits may begin at any key.
static int64_t words_of(const TailInputs &in) { return in.M / 64 + 2; }

// What the members of one head leave, in the order of the queries.
struct NearHead {
  float *shifts;                       // (N,X) u
  float *highest, *of_top, *of_cells;  // (N) the largest logit, and t, ρ in units of its exponential
  float *top_values, *cell_values;     // (N,E') T and R, likewise
  uint64_t *listed;                    // (C,words) a bit for each top key of a cluster

  NearHead(Arena &arena, const TailInputs &in, bool keeps_shifts) {
    const int64_t N = in.window > 0 ? in.N : 0, E = round_up(in.E, W);
    shifts = arena.take<float>(keeps_shifts ? N * in.cells : 0);
    highest = arena.take<float>(N);
    of_top = arena.take<float>(N);
    of_cells = arena.take<float>(N);
    top_values = arena.take<float>(N * E);
    cell_values = arena.take<float>(N * E);
    listed = arena.take<uint64_t>(in.window > 0 ? in.clusters * words_of(in) : 0);
  }
};

// A tile of queries, and the run of keys that they reach.
struct NearTile {
  int64_t first, count, from, to;
  int64_t keys() const { return to - from; }
  int64_t lanes() const { return round_up(to - from, W); }
};

struct NearScratch {
  float *queries, *means;   // (NEAR_QUERIES,D')
  float *exact, *counted;   // (NEAR_QUERIES,lanes) the logits of w and of r, and these
  float *table;             // (X') the shifts of one query
  float *out;               // (NEAR_QUERIES,E')

  static int64_t lanes_of(const TailInputs &in) {
    const int64_t run = NEAR_QUERIES + 2 * window_of(in);
    return round_up(run < in.M ? run : in.M, W);
  }
  // Limited so that adding positions to it does not overflow, and not to the number of tokens: queries may be farther
  // from the keys than that.
  static int64_t window_of(const TailInputs &in) { return in.window < 1ll << 60 ? in.window : 1ll << 60; }

  NearScratch(Arena &arena, const TailInputs &in) {
    const int64_t tile = in.window > 0 ? NEAR_QUERIES : 0;
    queries = arena.take<float>(tile * round_up(in.D, W));
    means = arena.take<float>(tile * round_up(in.D, W));
    exact = arena.take<float>(tile * lanes_of(in));
    counted = arena.take<float>(tile * lanes_of(in));
    table = arena.take<float>(table_of(in.cells));
    out = arena.take<float>(tile * round_up(in.E, W));
  }
};

// The position of the first query among the keys, limited to the distance at which no window reaches any key.
static int64_t start_of(const TailInputs &in, int64_t b) {
  const int64_t start = in.start ? in.start[b] : 0, far = NearScratch::window_of(in) + in.N + in.M + 1;
  return start < -far ? -far : start > far ? far : start;
}

// The keys [from, to) that queries [first, first + count) reach.
static NearTile near_tile(const TailInputs &in, int64_t b, int64_t first, int64_t count) {
  const int64_t window = NearScratch::window_of(in), at = first + start_of(in, b);
  const int64_t from = at - window, to = at + count + window;
  NearTile tile = {first, count, from < 0 ? 0 : from, to < in.M ? to : in.M};
  if (tile.to < tile.from) tile.from = tile.to = 0;
  return tile;
}

template <class T>
static void pack_near_keys(const TailInputs &in, int64_t b, int64_t g, int64_t at, const NearKeys &to, bool backward) {
  const int64_t D = round_up(in.D, W), E = round_up(in.E, W), M = round_up(in.M, W);
  const int64_t *cell = in.cell + (b * in.G + g) * in.M;
  float *rows = to.rows[at], *values = to.values[at];
  for (int64_t j = 0; j < M; j++) {
    const bool none = j >= in.M || cell[j] >= in.cells;
    if (none) {
      zero(rows + j * D, D);
      zero(values + j * E, E);
    } else {
      load_row(row_of<T>(in.key, b, g, j), in.D, rows + j * D, D);
      load_row(row_of<T>(in.value, b, g, j), in.E, values + j * E, E);
    }
  }
  for (int64_t j = 0; j < to.lanes; j++) to.cell[at][j] = j < in.M ? (int32_t)cell[j] : (int32_t)in.cells;
  pack_transposed(rows, M, in.D, D, to.across[at], to.lanes);
  for (int64_t d = 0; d < in.D; d++) zero(to.across[at] + d * to.lanes + M, to.lanes - M);
  if (!backward) return;
  pack_transposed(values, M, in.E, E, to.values_across[at], to.lanes);
  for (int64_t e = 0; e < in.E; e++) zero(to.values_across[at] + e * to.lanes + M, to.lanes - M);
}

// The top keys of cluster c as bits, by position.
static void list_top(const TailInputs &in, const TailSaved &saved, int64_t bh, int64_t c, uint64_t *listed) {
  const int64_t bg = bh / in.H * in.G + bh % in.H / (in.H / in.G);
  const int32_t *top = saved.top + (bh * in.clusters + c) * in.topk, *order = saved.key_order + bg * in.M;
  uint64_t *bits = listed + c * words_of(in);
  for (int64_t i = 0; i < words_of(in); i++) bits[i] = 0;
  for (int64_t k = 0; k < in.topk && top[k] >= 0; k++) bits[order[top[k]] / 64] |= 1ull << (order[top[k]] % 64);
}

// The bits of keys [at, at + W).
static inline uint32_t bits_at(const uint64_t *bits, int64_t at) {
  const int64_t word = at / 64, shift = at % 64;
  const uint64_t low = bits[word] >> shift, high = shift ? bits[word + 1] << (64 - shift) : 0;
  return (uint32_t)(low | high);
}

// A tile's queries and their means, packed; 0 for a query in no cluster.
template <class T>
static void pack_near_queries(const TailInputs &in, const TailSaved &saved, int64_t bh, const NearTile &tile,
                              const NearScratch &own) {
  const int64_t D = round_up(in.D, W);
  for (int64_t i = 0; i < tile.count; i++) {
    const int64_t c = in.labels[bh * in.N + tile.first + i];
    if (c == in.clusters) {
      zero(own.queries + i * D, D);
      zero(own.means + i * D, D);
    } else {
      load_row(row_of<T>(in.query, bh / in.H, bh % in.H, tile.first + i), in.D, own.queries + i * D, D);
      load_row(saved.centroids + (bh * in.clusters + c) * in.D, in.D, own.means + i * D, D);
    }
  }
}

// The logits of w and r of a packed tile, −∞ for pairs that are not near.
static void near_logits(const TailInputs &in, const NearKeys &keys, int64_t at, int64_t bh, const float *shifts,
                        const uint64_t *listed, const NearTile &tile, const NearScratch &own) {
  const int64_t D = round_up(in.D, W), lanes = tile.lanes(), window = NearScratch::window_of(in);
  const float *across = keys.across[at] + tile.from;
  gemm(tile.count, lanes, in.D, own.queries, D, 1, across, keys.lanes, own.exact, lanes, false, in.scale);
  gemm(tile.count, lanes, in.D, own.means, D, 1, across, keys.lanes, own.counted, lanes, false, in.scale);
  vi ramp, bit;
  for (int lane = 0; lane < W; lane++) ramp[lane] = lane, bit[lane] = 1 << lane;
  const vf none = splat(-__builtin_inff());
  for (int64_t i = 0; i < tile.count; i++) {
    const int64_t query = tile.first + i, c = in.labels[bh * in.N + query];
    const int64_t stands = query + start_of(in, bh / in.H);
    const bool in_none = c == in.clusters;
    const int32_t low = (int32_t)(stands - window > tile.from ? stands - window - tile.from : 0);
    const int64_t end = in_none ? 0 : stands + window + 1 < tile.to ? stands + window + 1 - tile.from : tile.keys();
    for (int64_t x = 0; x < in.cells; x++) own.table[x] = shifts[query * in.cells + x];
    for (int64_t v = 0; v < lanes; v += W) {
      float *exact = own.exact + i * lanes + v, *counted = own.counted + i * lanes + v;
      if (v + W <= low || v >= end) {
        store(exact, none);
        store(counted, none);
        continue;
      }
      const vi cell = *(const vi_anywhere *)(keys.cell[at] + tile.from + v), place = ramp + (int32_t)v;
      const vi top = (bit & (int32_t)bits_at(listed + c * words_of(in), tile.from + v)) != 0;
      const vi met = (place >= low) & (place < (int32_t)end) & (cell < (int32_t)in.cells) & ~top;
      store(exact, select(met, load(exact), none));
      store(counted, select(met, load(counted) + look_up(own.table, in.cells, cell), none));
    }
  }
}

// Rows of products of members, as `exp_rows`: weights in their place, with the sums of those before lane `cells` and of
// those from there on, in units of e^{highest}. `shifts` gets row i's u, at its place in `order`.
template <class Number>
static void exp_rows_apart(float *rows, int64_t count, int64_t lanes, float scale, const float *bias, int64_t cells,
                           int64_t X, const float *cell_lse, const float *cell_residual, const int32_t *order,
                           float *shifts, const NearHead &to) {
  vi ramp;
  for (int lane = 0; lane < W; lane++) ramp[lane] = lane;
  for (int64_t i = 0; i < count; i++) {
    float *row = rows + i * lanes, *shift = shifts + order[i] * X;
    vf high = splat(-__builtin_inff()), of_top = {}, of_cells = {};
    for (int64_t j = 0; j < lanes; j += W) {
      const vf logits = load(row + j) * scale + load(bias + j);
      store(row + j, logits);
      high = maximum(logits, high);
    }
    for (int64_t x = 0; x < X; x++)  // of a cell without keys nothing is counted
      shift[x] = cell_lse[x] == -__builtin_inff() ? 0 : (row[cells + x] - cell_lse[x]) - cell_residual[x];
    const float top = highest(high);
    for (int64_t j = 0; j < lanes; j += W) {
      const vf p = weight_of<Number>(load(row + j) - top);
      const vi of_cell = ramp + (int32_t)j >= (int32_t)cells;
      of_top += select(of_cell, vf{}, p);
      of_cells += select(of_cell, p, vf{});
      store(row + j, p);
    }
    if constexpr (__is_same(Number, Pair))
      for (int64_t j = 0; j < lanes; j += 2 * W)
        store((Pair *)rows + (i * lanes + j) / 2, paired_neighbours(row + j));
    to.highest[order[i]] = top;
    to.of_top[order[i]] = sum(of_top);
    to.of_cells[order[i]] = sum(of_cells);
  }
}

// A tile of queries: what is near, merged with what the members left.
template <class T>
static void attend_near(const TailForward &a, const NearKeys &keys, int64_t at, int64_t bh, const float *shifts,
                        const NearHead &head, int64_t first, int64_t count, const NearScratch &own) {
  const TailInputs &in = a.inputs;
  const int64_t b = bh / in.H, h = bh % in.H, E = round_up(in.E, W);
  const NearTile tile = near_tile(in, b, first, count);
  const int64_t lanes = tile.lanes();
  pack_near_queries<T>(in, a.saved, bh, tile, own);
  near_logits(in, keys, at, bh, shifts, head.listed, tile, own);
  float base[NEAR_QUERIES], total[NEAR_QUERIES], shrink[NEAR_QUERIES], kept[NEAR_QUERIES];
  for (int64_t i = 0; i < count; i++) {
    if (in.labels[bh * in.N + first + i] == in.clusters) continue;
    float *exact = own.exact + i * lanes, *counted = own.counted + i * lanes;
    vf high = splat(-__builtin_inff()), of_exact = {}, of_counted = {};
    for (int64_t v = 0; v < lanes; v += W) high = maximum(load(exact + v), high);
    const float members = head.highest[first + i], near = highest(high);
    const float largest = near > members ? near : members, shift = largest == -__builtin_inff() ? 0 : largest;
    for (int64_t v = 0; v < lanes; v += W) {
      const vf w = exp_nonpositive<SHRUNK>(load(exact + v) - shift);
      const vf r = exp_nonpositive<SHRUNK>(load(counted + v) - shift);
      store(exact + v, w);
      store(counted + v, r);
      of_exact += w;
      of_counted += r;
    }
    shrink[i] = members == -__builtin_inff() ? 0 : __builtin_expf(members - shift);
    const float cells = head.of_cells[first + i] * shrink[i], left = cells - sum(of_counted);
    kept[i] = left <= cells * NEAR_ROUNDING<Number<T>> ? 0 : 1;
    total[i] = head.of_top[first + i] * shrink[i] + sum(of_exact) + (kept[i] ? left : 0);
    base[i] = shift;
    if (kept[i])
      for (int64_t v = 0; v < lanes; v += W) store(exact + v, load(exact + v) - load(counted + v));
  }
  const PackedRows<float> values = {keys.values[at] + tile.from * E, E};
  gemm_with(count, E, tile.keys(), own.exact, lanes, 1, values, Product{own.out, E, false});
  for (int64_t i = 0; i < count; i++) {
    const int64_t query = first + i;
    if (in.labels[bh * in.N + query] == in.clusters) continue;
    const float norm = total[i] == 0 ? 0 : 1 / total[i], of_members = shrink[i] * norm;
    const float *top = head.top_values + query * E, *cells = head.cell_values + query * E;
    float *out = own.out + i * E;
    for (int64_t e = 0; e < E; e += W) {
      const vf others = kept[i] ? load(top + e) + load(cells + e) : load(top + e);
      store(out + e, load(out + e) * norm + others * of_members);
    }
    store_row(out, in.E, row_of<T>(a.out, b, h, query));
    const float log_total = __builtin_logf(total[i] * GROWN);
    const float lse = total[i] == 0 ? -__builtin_inff() : base[i] + log_total;
    a.lse[bh * in.N + query] = lse;
    if (!a.saved.kept) continue;
    a.saved.kept[bh * in.N + query] = kept[i];
    a.saved.residual[bh * in.N + query] = residual_of(lse, base[i], log_total);
  }
}
