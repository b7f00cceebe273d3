// Exact attention of a few queries, as in steps on a cache, where the time is that of reading keys and values: each is read
// once, for all rows (the queries of all heads that share the key head), and widened in registers. The keys are cut into
// chunks, which are the tasks of the threads:
//
//             keys →
//          ┌────────┬────────┬────────┬───┐
//     rows │ chunk  │ chunk  │ chunk  │   │   each chunk gives every row a partial: its sum of values, the highest
//          └────────┴────────┴────────┴───┘   logit and the sum of weights; partials are merged in the order of chunks
//
// Chunks begin at positions that depend on nothing but the number of rows: results do not depend on the number of threads,
// nor on keys behind the last one that is seen. A chunk is read tile by tile; a tile stays in the cache while blocks of
// STEP_ROWS rows go over it. A logit is a product along D, so that a vector holds parts of one logit; those of W keys are
// added up by transposing them. From STEP_MANY rows on, keys are transposed instead.
//
// As in `exact_forward.hpp`, weights are 2^−SHRUNK of what they are; a query that sees keys, all with logits of −∞, has an
// output of NaN, and one that sees none, or is padding, has 0. A weight of 0 is never multiplied with a value that its query
// does not see, so that these may be NaN or infinite.

constexpr int64_t STEP_TILE = 256;        // keys; a multiple of W
constexpr int64_t STEP_SPAN = 64;         // keys of one sum of values
constexpr int64_t STEP_CHUNK = 4096;      // the most keys of a chunk
constexpr int64_t STEP_RUN = 8;           // the most chunks of a task
constexpr int64_t STEP_ROWS = 4;          // of a block
constexpr int64_t STEP_MANY = 13;         // rows, from which on a tile is multiplied as a matrix
constexpr int64_t STEP_BLOCK = 64;        // rows of such a product
constexpr int64_t STEP_AHEAD = 8192;      // bytes of rows, after which a row is asked for in advance
constexpr int64_t FAR = (int64_t)1 << 60;  // further than any key; sums of two such numbers do not overflow

struct KeyRange {
  int64_t first, end;
  KeyRange within(const KeyRange &other) const {
    return {first > other.first ? first : other.first, end < other.end ? end : other.end};
  }
  bool empty() const { return first >= end; }
};

static int64_t between(int64_t low, int64_t x, int64_t high) { return x < low ? low : x > high ? high : x; }

// A query's position among the keys, as far away as FAR.
static int64_t step_position(const Steps &a, int64_t b, int64_t query) {
  const int64_t of_item = a.offsets ? between(-FAR, a.offsets[b], FAR) : 0;
  return between(-FAR, between(-FAR, a.offset, FAR) + of_item + query, FAR);
}

// The keys that causality and the window let a query see; none for padding.
static KeyRange keys_of_step(const Steps &a, int64_t b, int64_t query) {
  if (a.query_valid && !a.query_valid[b * a.N + query]) return {0, 0};
  const int64_t at = step_position(a, b, query), window = a.window < 0 ? -1 : between(0, a.window, FAR);
  KeyRange keys = {0, a.M};
  if (window >= 0) keys = {at - window, at + window + 1};
  if (a.causal) keys.end = at + 1;
  return {between(0, keys.first, a.M), between(0, keys.end, a.M)};
}

// The keys that any query of an item sees, and some between.
static KeyRange keys_of_item(const Steps &a, int64_t b) {
  KeyRange all = {a.M, 0};
  for (int64_t query = 0; query < a.N; query++) {
    const KeyRange keys = keys_of_step(a, b, query);
    if (keys.empty()) continue;
    all = {all.first < keys.first ? all.first : keys.first, all.end > keys.end ? all.end : keys.end};
  }
  return all.empty() ? KeyRange{0, 0} : all;
}

// Numbers that a product multiplies, as a vector of the type that it takes.
static inline vf load_wide(const float *p) { return load(p); }
static inline vu load_wide(const Pair *p) { return load(p); }
static inline vf load_wide(const bf16 *p) {
#if defined(__AVX512F__)  // GCC converts in halves, which takes seven instructions instead of one
  return (vf)((vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)) << 16);
#else
  typedef uint16_t halves __attribute__((vector_size(W * 2), aligned(2), may_alias));
  return (vf)(__builtin_convertvector(*(const halves *)p, vu) << 16);
#endif
}
static inline vf load_wide(const f16 *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
  vf wide;
  for (int lane = 0; lane < W; lane++) wide[lane] = widen(p[lane]);
  return wide;
#endif
}

// V vectors of numbers that follow each other. Two vectors of bf16 are loaded as one and split into the numbers at even and
// at odd places, which takes an instruction a vector.
template <int V, class S, class Vector>
static inline void load_vectors(const S *p, Vector (&x)[V]) {
  int v = 0;
  if constexpr (__is_same(S, bf16)) {
    typedef uint32_t pairs_of_halves __attribute__((vector_size(W * 4), aligned(2), may_alias));
    UNROLL for (; v + 2 <= V; v += 2) {
      split_pairs(*(const pairs_of_halves *)(p + v * W), x[v], x[v + 1]);
    }
  }
  UNROLL for (; v < V; v++) x[v] = load_wide(p + v * W);
}

// V vectors as `load_vectors` has loaded them, in the order of the numbers again.
template <class S, int V>
static inline void in_order(vf (&x)[V]) {
  if constexpr (__is_same(S, bf16)) {
    UNROLL for (int v = 0; v + 2 <= V; v += 2) join_pairs(x[v], x[v + 1]);
  }
}

// Rows where the caller has them, or packed.
template <class S>
struct StepRows {
  const S *first;
  int64_t row;
  const int32_t *at;  // null: one after the other
  const S *operator[](int64_t j) const { return first + (at ? at[j] : j) * row; }

  // Addresses of the rows from `from` to `end`, and of the last one again up to `count`: found before products begin,
  // which then wait for no arithmetic of addresses.
  void find(int64_t from, int64_t end, int64_t count, const S **rows) const {
    if (at) {
      for (int64_t j = 0; j < count; j++) rows[j] = first + at[from + j < end ? from + j : end - 1] * row;
      return;
    }
    const S *here = first + from * row;
    for (int64_t j = 0; j < count; j++) {
      rows[j] = here;
      here += from + j + 1 < end ? row : 0;
    }
  }

  // Asks for a part of a row that comes later, for the cache of the second level, whose own prefetching ends with a page.
  // It may lie behind the last row: nothing is read.
  void ask_beyond(const S *part, int64_t width) const {
    const int64_t bytes = width * (int64_t)sizeof(S);
    if (bytes == 0) return;
    const uintptr_t later = (uintptr_t)part + STEP_AHEAD / bytes * row * (int64_t)sizeof(S);
    for (int64_t at = 0; at < bytes; at += CACHE_LINE) __builtin_prefetch((const void *)(later + at), 0, 2);
  }
};

template <int R>
struct RowVectors {
  vf of[R];
};

// R logits of W keys each, from the W·R vectors whose lanes add up to them; vectors_of(j) gives those of key j.
template <int R, int stride, class VectorsOf>
__attribute__((always_inline)) static inline RowVectors<R> added_up(int first, VectorsOf &&vectors_of) {
  if constexpr (stride == W) {
    return vectors_of(first);
  } else {
    constexpr auto lanes = std::make_integer_sequence<int, W>{};
    const RowVectors<R> low = added_up<R, 2 * stride>(first, vectors_of);
    const RowVectors<R> high = added_up<R, 2 * stride>(first + stride, vectors_of);
    RowVectors<R> both;
    UNROLL for (int r = 0; r < R; r++)
      both.of[r] = interleave<0>(low.of[r], high.of[r], lanes) + interleave<W / 2>(low.of[r], high.of[r], lanes);
    return both;
  }
}

// Adds the products of V vectors of a key with those of R queries.
template <int R, int V, class S, class Q>
__attribute__((always_inline)) static inline void multiply_vectors(const S *key, const Q *queries, int64_t query_row,
                                                                   RowVectors<R> &sums) {
  decltype(load_wide(key)) x[V];
  load_vectors<V>(key, x);
  UNROLL for (int v = 0; v < V; v++)
    UNROLL for (int r = 0; r < R; r++)
      sums.of[r] = multiply_add(load(queries + r * query_row + v * W), x[v], sums.of[r]);
}

// Logits of R rows with `count` keys, in whole vectors: those behind the last key are of no use. `vectors` of a row; V of
// them where that is known to the compiler, else V is 0. The numbers of queries are in the order of `load_vectors`.
template <int R, int V, class S, class Q>
static void step_logits(const StepRows<S> &keys, int64_t count, int64_t vectors, const Q *queries, int64_t query_row,
                        float scale, float *logits) {
  for (int64_t j = 0; j < count; j += W) {
    const S *some[W];
    keys.find(j, count, W, some);
    const RowVectors<R> sums = added_up<R, 1>(0, [&](int k) __attribute__((always_inline)) {
      const S *key = some[k];
      RowVectors<R> own = {};
      keys.ask_beyond(key, (V > 0 ? V : vectors) * W);
      if constexpr (V > 0) {
        multiply_vectors<R, V>(key, queries, query_row, own);
      } else {
        int64_t v = 0;
        for (; v + 2 <= vectors; v += 2) multiply_vectors<R, 2>(key + v * W, queries + v * W, query_row, own);
        if (v < vectors) multiply_vectors<R, 1>(key + v * W, queries + v * W, query_row, own);
      }
      return own;
    });
    UNROLL for (int r = 0; r < R; r++) store(logits + r * STEP_TILE + j, sums.of[r] * scale);
  }
}

// Adds the weighted values of `count` keys to V·W columns of R rows.
template <int R, int V, class S>
static void add_step_columns(const StepRows<S> &values, const S *const *rows, int64_t count, int64_t column,
                             const float *weights, float *out, int64_t out_row) {
  vf sums[R][V] = {};
  for (int64_t j = 0; j < count; j++) {
    const S *value = rows[j] + column;
    vf x[V];
    values.ask_beyond(value, V * W);
    load_vectors<V>(value, x);
    UNROLL for (int r = 0; r < R; r++) {
      const vf weight = splat(weights[r * STEP_TILE + j]);
      UNROLL for (int v = 0; v < V; v++) sums[r][v] = multiply_add(weight, x[v], sums[r][v]);
    }
  }
  UNROLL for (int r = 0; r < R; r++) {
    in_order<S>(sums[r]);
    UNROLL for (int v = 0; v < V; v++) {
      float *to = out + r * out_row + column + v * W;
      store(to, load(to) + sums[r][v]);
    }
  }
}

template <int R, class S>
static void add_step_values(const StepRows<S> &values, int64_t first, int64_t end, int64_t width, const float *weights,
                            float *out, int64_t out_row) {
  // Sums start at 0 again every STEP_SPAN keys: the error of a sum grows with the number of its terms.
  for (int64_t next; first < end; first = next) {
    next = first / STEP_SPAN * STEP_SPAN + STEP_SPAN;
    const int64_t last = next < end ? next : end, count = last - first;
    const S *rows[STEP_SPAN];
    values.find(first, last, count, rows);
    int64_t column = 0;
    for (; column + 4 * W <= width; column += 4 * W)
      add_step_columns<R, 4>(values, rows, count, column, weights + first, out, out_row);
    if (column + 2 * W <= width) {
      add_step_columns<R, 2>(values, rows, count, column, weights + first, out, out_row);
      column += 2 * W;
    }
    if (column < width) add_step_columns<R, 1>(values, rows, count, column, weights + first, out, out_row);
  }
}

// c·tanh(x / c) in place.
static void cap_logits(float *logits, int64_t count, float cap) {
  for (int64_t j = 0; j < count; j += W) {
    const vf x = load(logits + j) / splat(cap), size = select(x < vf{}, -x, x);
    // tanh|x| = (1 − e) / (1 + e) with e = e^−2|x|; near 0, where 1 − e loses digits, by its series
    const vf e = exp_nonpositive(size * -2.0f), square = x * x;
    const vf far = (1.0f - e) / (1.0f + e);
    const vf near = size * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315 + square * (62.0f / 2835)))));
    const vf capped = select(size < splat(0.25f), near, far) * cap;
    store(logits + j, select(x < vf{}, -capped, capped));
  }
}

// Logits of one row to weights, those outside `seen` being 0. The sum of the weights.
static float weigh_step(float *logits, int64_t count, const KeyRange &seen, float base) {
  vi ramp;
  for (int lane = 0; lane < W; lane++) ramp[lane] = lane;
  vf sums = {};
  for (int64_t j = 0; j < count; j += W) {
    vf weight = exp_nonpositive<SHRUNK>(load(logits + j) - base);
    if (j < seen.first || j + W > seen.end) {
      const vi at = ramp + (int32_t)j;
      weight = select((at >= (int32_t)seen.first) & (at < (int32_t)seen.end), weight, vf{});
    }
    sums += weight;
    store(logits + j, weight);
  }
  return sum(sums);
}

// The highest logit that a row sees, passing over NaN.
static float highest_step(const float *logits, const KeyRange &seen, float before) {
  vi ramp;
  for (int lane = 0; lane < W; lane++) ramp[lane] = lane;
  vf high = splat(before);
  for (int64_t j = seen.first / W * W; j < seen.end; j += W) {
    vf x = load(logits + j);
    if (j < seen.first || j + W > seen.end) {
      const vi at = ramp + (int32_t)j;
      x = select((at >= (int32_t)seen.first) & (at < (int32_t)seen.end), x, splat(-__builtin_inff()));
    }
    high = maximum(x, high);
  }
  return highest(high);
}

// What rows have got of a chunk's keys.
struct StepPartial {
  float *out;       // (rows,E')
  float *highest;   // (rows)
  float *total;     // (rows); −1 where a row has seen no key
};

// Whether keys are read where they are: in whole vectors of what products multiply.
template <class T>
static bool keys_in_place(const Steps &a) {
  if constexpr (!Factor<T>::PAIRED) return a.D % W == 0;
  const bool aligned = (uintptr_t)a.key.data % alignof(Pair) == 0 && a.key.batch % 2 == 0 && a.key.head % 2 == 0;
  return a.D % (2 * W) == 0 && a.key.token % 2 == 0 && aligned;
}

template <class T>
struct StepScratch {
  Number<T> *queries;  // (rows,D')
  Number<T> *keys;     // (STEP_TILE,D') where they cannot be read in place
  Number<T> *across;   // (D',STEP_TILE) the same transposed, for many rows
  float *values;       // (STEP_TILE,E') where they cannot be read in place
  int32_t *at;         // (STEP_TILE) the valid keys of a tile
  float *logits;       // (STEP_ROWS or STEP_BLOCK,STEP_TILE), and the weights

  StepScratch(Arena &arena, const Steps &a, int64_t rows) {
    const int64_t D = round_up(steps_of<Number<T>>(a.D), W), E = round_up(a.E, W);
    queries = arena.take<Number<T>>(rows * D);
    const bool many = rows >= STEP_MANY, widened = !__is_same(T, Number<T>) && !Factor<T>::PAIRED;
    keys = arena.take<Number<T>>(keys_in_place<T>(a) && !(many && widened) ? 0 : STEP_TILE * D);
    across = arena.take<Number<T>>(many ? STEP_TILE * D : 0);
    values = arena.take<float>(a.E == E && !many ? 0 : STEP_TILE * E);
    at = arena.take<int32_t>(STEP_TILE);
    logits = arena.take<float>((many ? STEP_BLOCK : STEP_ROWS) * STEP_TILE);
  }
};

// A tile's valid keys, by number.
struct StepTile {
  int64_t first;      // the number of the tile's first key
  const int32_t *at;  // valid keys, less `first`; null: all of them
  int64_t count;

  // Which of these keys are among those with the numbers `seen`.
  KeyRange ranks(const KeyRange &seen) const {
    if (!at) return KeyRange{seen.first - first, seen.end - first}.within({0, count});
    return {rank(seen.first - first), rank(seen.end - first)};
  }
  int64_t rank(int64_t key) const {
    int64_t low = 0;
    while (low < count && at[low] < key) low++;
    return low;
  }
};

static StepTile tile_of_steps(const Steps &a, int64_t b, const KeyRange &keys, int32_t *at) {
  const int64_t count = keys.end - keys.first;
  const uint8_t *valid = a.key_valid ? a.key_valid + b * a.M + keys.first : nullptr;
  if (!valid || !__builtin_memchr(valid, 0, count)) return {keys.first, nullptr, count};
  int64_t valids = 0;
  for (int64_t j = 0; j < count; j++) {
    at[valids] = (int32_t)j;
    valids += valid[j] != 0;
  }
  return {keys.first, at, valids};
}

// Which keys of a tile the rows of a block see: each of them, all of them together, and any.
struct SeenKeys {
  KeyRange of[STEP_BLOCK], by_all, by_any;

  SeenKeys(const Steps &a, int64_t b, int64_t row, int64_t rows, const StepTile &tile) {
    const int64_t group = a.H / a.G;
    by_all = {0, tile.count};
    by_any = {tile.count, 0};
    for (int64_t r = 0; r < rows; r++) {
      const bool as_before = r > 0 && (row + r) % group != 0;  // of the same query
      of[r] = as_before ? of[r - 1] : tile.ranks(keys_of_step(a, b, (row + r) / group));
      by_all = by_all.within(of[r]);
      if (of[r].empty()) continue;
      if (of[r].first < by_any.first) by_any.first = of[r].first;
      if (of[r].end > by_any.end) by_any.end = of[r].end;
    }
    if (by_all.empty()) by_all = {by_any.end, by_any.end};
  }
  // From whole vectors on, so that a key's lane depends on its place in the tile alone.
  int64_t from() const { return by_any.first / W * W; }
};

// The logits of a block's rows to weights; what they have got so far shrinks.
static void weigh_rows(const Steps &a, int64_t row, int64_t rows, const SeenKeys &seen, int64_t E, float *logits,
                       const StepPartial &to) {
  const int64_t from = seen.from(), count = seen.by_any.end - from;
  for (int64_t r = 0; r < rows; r++) {
    const KeyRange &own = seen.of[r];
    float *of_row = logits + r * STEP_TILE;
    if (own.empty()) {
      zero(of_row + from, count);
      continue;
    }
    if (a.softcap > 0) cap_logits(of_row + from, count, a.softcap);
    const float before = to.highest[row + r], high = highest_step(of_row, own, before);
    const float base = high == -__builtin_inff() ? 0 : high;
    const float total = weigh_step(of_row + from, count, {own.first - from, own.end - from}, base);
    float *out = to.out + (row + r) * E, &all = to.total[row + r];
    if (all < 0) all = 0;
    else if (before != high) {
      const float shrink = exp_nonpositive(splat(before - base))[0];
      for (int64_t e = 0; e < E; e += W) store(out + e, load(out + e) * shrink);
      all *= shrink;
    }
    all += total;
    to.highest[row + r] = high;
  }
}

// The values of keys that only some rows see: one row at a time, because these values may not be finite.
template <class S>
static void add_partly_seen(const StepRows<S> &values, int64_t row, int64_t rows, const SeenKeys &seen, int64_t E,
                            const float *weights, const StepPartial &to) {
  for (int64_t r = 0; r < rows; r++)
    for (const KeyRange &some : {KeyRange{seen.by_any.first, seen.by_all.first}, {seen.by_all.end, seen.by_any.end}}) {
      const KeyRange own = some.within(seen.of[r]);
      add_step_values<1>(values, own.first, own.end, E, weights + r * STEP_TILE, to.out + (row + r) * E, E);
    }
}

// One block of R rows over a tile.
template <int R, class KeyNumber, class ValueNumber, class Q>
static void attend_rows(const Steps &a, int64_t b, int64_t row, const StepTile &tile, const StepRows<KeyNumber> &keys,
                        const StepRows<ValueNumber> &values, const Q *queries, int64_t query_row, int64_t E, float *logits,
                        const StepPartial &to) {
  const SeenKeys seen(a, b, row, R, tile);
  if (seen.by_any.empty()) return;
  const int64_t from = seen.from(), vectors = query_row / W;
  const StepRows<KeyNumber> later = {keys.at ? keys.first : keys[from], keys.row, keys.at ? keys.at + from : nullptr};
  auto logits_of = [&](auto V) {
    step_logits<R, decltype(V)::value>(later, seen.by_any.end - from, vectors, queries, query_row, a.scale,
                                       logits + from);
  };
  if (vectors == 2) logits_of(std::integral_constant<int, 2>{});
  else if (vectors == 4) logits_of(std::integral_constant<int, 4>{});
  else if (vectors == 8) logits_of(std::integral_constant<int, 8>{});
  else logits_of(std::integral_constant<int, 0>{});
  weigh_rows(a, row, R, seen, E, logits, to);
  add_partly_seen(values, row, R, seen, E, logits, to);
  add_step_values<R>(values, seen.by_all.first, seen.by_all.end, E, logits, to.out + row * E, E);
}

// Many rows over a tile: with keys as lanes, a product of matrices, for which keys are transposed and values widened once.
template <class T>
static void attend_many(const Steps &a, int64_t b, int64_t g, int64_t rows, const StepTile &tile,
                        const StepScratch<T> &own, const StepPartial &to) {
  const int64_t steps = steps_of<Number<T>>(a.D), D = round_up(steps, W), E = round_up(a.E, W);
  auto at = [&](int64_t j) { return tile.first + (tile.at ? tile.at[j] : j); };
  StepRows<Number<T>> keys = {own.keys, D, nullptr};
  if (__is_same(T, float) || Factor<T>::PAIRED) {
    if (keys_in_place<T>(a)) keys = {(const Number<T> *)row_of<T>(a.key, b, g, tile.first),
                                     a.key.token * (int64_t)sizeof(T) / (int64_t)sizeof(Number<T>), tile.at};
  }
  if (keys.first == own.keys)
    for (int64_t j = 0; j < tile.count; j++)
      pack_factor_rows<T>(a.key, b, g, nullptr, at(j), 1, a.D, own.keys + j * D, D);
  const int64_t last = tile.count - 1, lanes = round_up(tile.count, W);
  pack_across(lanes, D, (float *)own.across, STEP_TILE, [&](int64_t j) {
    const Number<T> *row = keys[j < last ? j : last];
    keys.ask_beyond(row, D);
    return (const float *)row;  // moves bits alone
  });
  StepRows<float> values = {own.values, E, nullptr};
  if (__is_same(T, float) && a.E == E && !tile.at) {
    values = {row_of<float>(a.value, b, g, tile.first), a.value.token, nullptr};
  } else {
    const StepRows<T> wide = {row_of<T>(a.value, b, g, tile.first), a.value.token, tile.at};
    for (int64_t j = 0; j < tile.count; j++) {
      int64_t e = 0;
      wide.ask_beyond(wide[j], a.E);
      for (; e + W <= a.E; e += W) store(own.values + j * E + e, load_wide(wide[j] + e));
      load_row(wide[j] + e, a.E - e, own.values + j * E + e, E - e);
    }
  }
  for (int64_t row = 0; row < rows; row += STEP_BLOCK) {
    const int64_t some = rows - row < STEP_BLOCK ? rows - row : STEP_BLOCK;
    const SeenKeys seen(a, b, row, some, tile);
    if (seen.by_any.empty()) continue;
    const int64_t from = seen.from();
    gemm(some, round_up(seen.by_any.end - from, W), steps, own.queries + row * D, D, 1, own.across + from, STEP_TILE,
         own.logits + from, STEP_TILE, false, a.scale);
    weigh_rows(a, row, some, seen, E, own.logits, to);
    add_partly_seen(values, row, some, seen, E, own.logits, to);
    if (!seen.by_all.empty())
      gemm(some, E, seen.by_all.end - seen.by_all.first, own.logits + seen.by_all.first, STEP_TILE, 1,
           values[seen.by_all.first], values.row, to.out + row * E, E, true);
  }
}

// A query's numbers: in the order of `load_vectors` where keys are read so, else as they are.
template <class T>
static void pack_step_query(const Steps &a, int64_t b, int64_t h, int64_t query, int64_t rows, Number<T> *to, int64_t padded) {
  if constexpr (__is_same(T, bf16) && !Factor<T>::PAIRED) {
    if (rows < STEP_MANY && keys_in_place<T>(a)) {
      const T *from = row_of<T>(a.query, b, h, query);
      int64_t d = 0;
      for (; d + 2 * W <= a.D; d += 2 * W) {
        vf two[2];
        load_vectors<2>(from + d, two);
        store(to + d, two[0]);
        store(to + d + W, two[1]);
      }
      if (d < a.D) store(to + d, load_wide(from + d));
      return;
    }
  }
  pack_factor_rows<T>(a.query, b, h, nullptr, query, 1, a.D, to, padded);
}

template <class T>
static void attend_chunk(const Steps &a, int64_t b, int64_t g, const KeyRange &chunk, int64_t rows,
                         const StepScratch<T> &own, const StepPartial &to) {
  const int64_t group = a.H / a.G, steps = steps_of<Number<T>>(a.D), D = round_up(steps, W), E = round_up(a.E, W);
  for (int64_t r = 0; r < rows; r++) {
    pack_step_query<T>(a, b, g * group + r % group, r / group, rows, own.queries + r * D, D);
    to.highest[r] = -__builtin_inff();
    to.total[r] = -1;
  }
  zero(to.out, rows * E);
  for (int64_t first = chunk.first / STEP_TILE * STEP_TILE; first < chunk.end; first += STEP_TILE) {
    const StepTile tile = tile_of_steps(a, b, KeyRange{first, first + STEP_TILE}.within({0, chunk.end}), own.at);
    if (tile.count == 0) continue;
    if (rows >= STEP_MANY) {
      attend_many<T>(a, b, g, rows, tile, own, to);
      continue;
    }
    const T *key = row_of<T>(a.key, b, g, first), *value = row_of<T>(a.value, b, g, first);
    auto attend = [&](auto keys, auto values) {
      for (int64_t r = 0; r < rows; r += STEP_ROWS) {
        auto block = [&](auto R) {
          attend_rows<decltype(R)::value>(a, b, r, tile, keys, values, own.queries + r * D, D, E, own.logits, to);
        };
        switch (rows - r) {
          case 1: block(std::integral_constant<int, 1>{}); break;
          case 2: block(std::integral_constant<int, 2>{}); break;
          case 3: block(std::integral_constant<int, 3>{}); break;
          default: block(std::integral_constant<int, 4>{}); break;
        }
      }
    };
    auto with_values = [&](auto keys) {
      if (a.E == E) return attend(keys, StepRows<T>{value, a.value.token, tile.at});
      for (int64_t j = 0; j < tile.count; j++)
        load_row(value + (tile.at ? tile.at[j] : j) * a.value.token, a.E, own.values + j * E, E);
      attend(keys, StepRows<float>{own.values, E, nullptr});
    };
    auto packed = [&] {
      for (int64_t j = 0; j < tile.count; j++)
        pack_factor_rows<T>(a.key, b, g, nullptr, first + (tile.at ? tile.at[j] : j), 1, a.D, own.keys + j * D, D);
      with_values(StepRows<Number<T>>{own.keys, D, nullptr});
    };
    if (!keys_in_place<T>(a)) packed();
    else if constexpr (Factor<T>::PAIRED) with_values(StepRows<Pair>{(const Pair *)key, a.key.token / 2, tile.at});
    else with_values(StepRows<T>{key, a.key.token, tile.at});
  }
}

// A row's output and log-sum-exp from its partials, which lie `pitch` rows apart.
template <class T>
static void merge_chunks(const Steps &a, int64_t b, int64_t h, int64_t query, int64_t chunks, const StepPartial &of,
                         int64_t pitch, double *sums, float *narrow_sums) {
  const int64_t E = round_up(a.E, W);
  float high = -__builtin_inff();
  bool any = false;
  for (int64_t c = 0; c < chunks; c++) {
    any |= of.total[c * pitch] >= 0 || of.total[c * pitch] != of.total[c * pitch];
    if (of.highest[c * pitch] > high) high = of.highest[c * pitch];
  }
  const float base = high == -__builtin_inff() ? 0 : high;
  double total = 0;
  for (int64_t e = 0; e < E; e++) sums[e] = 0;
  for (int64_t c = 0; c < chunks; c++) {
    if (of.total[c * pitch] < 0) continue;
    const double share = __builtin_exp((double)(of.highest[c * pitch] - base));
    const float *out = of.out + c * pitch * E;
    for (int64_t e = 0; e < E; e++) sums[e] += share * (double)out[e];
    total += share * (double)of.total[c * pitch];
  }
  for (int64_t e = 0; e < E; e++) narrow_sums[e] = any ? (float)(sums[e] / total) : 0;
  store_row(narrow_sums, a.E, row_of<T>(a.out, b, h, query));
  const bool none = !any || total == 0;
  a.lse[(b * a.H + h) * a.N + query] = none ? -__builtin_inff() : high + (float)__builtin_log(total * GROWN);
}

struct StepMerging {
  double *sums;  // (E')
  float *narrow_sums;
  StepMerging(Arena &arena, const Steps &a) {
    sums = arena.take<double>(round_up(a.E, W));
    narrow_sums = arena.take<float>(round_up(a.E, W));
  }
};

template <class T>
static int64_t steps_forward_of(const Steps &a, void *workspace) {
  if (a.G == 0) return a.H == 0 ? 0 : BAD_LIST;
  Arena arena{(char *)workspace};
  const int64_t group = a.H / a.G, rows = a.N * group, heads = a.B * a.G, E = round_up(a.E, W);
  int64_t length = STEP_TILE, chunks = 0;  // keys of a chunk, more for many rows; chunks of the longest item
  while (length < 32 * rows && length < STEP_CHUNK) length *= 2;
  auto chunks_of = [&](int64_t b) {
    const KeyRange keys = keys_of_item(a, b);
    return keys.empty() ? KeyRange{0, 0} : KeyRange{keys.first / length, (keys.end + length - 1) / length};
  };
  for (int64_t b = 0; b < a.B; b++) {
    const KeyRange own = chunks_of(b);
    if (own.end - own.first > chunks) chunks = own.end - own.first;
  }
  StepPartial all;
  all.out = arena.take<float>(heads * chunks * rows * E);
  all.highest = arena.take<float>(heads * chunks * rows);
  all.total = arena.take<float>(heads * chunks * rows);
  const PerThread<StepScratch<T>> scratch(arena, a.threads, a, rows);
  const PerThread<StepMerging> merging(arena, a.threads, a);
  if (!arena.base) return arena.used;
  auto partial = [&](int64_t head, int64_t chunk) {
    const int64_t row = (head * chunks + chunk) * rows;
    return StepPartial{all.out + row * E, all.highest + row, all.total + row};
  };
  // A task is a run of chunks, so that what a chunk asks for in advance is not for another thread.
  int64_t run = 1;
  while (run < STEP_RUN && heads * chunks >= 8 * a.threads * run) run *= 2;
  const int64_t runs = (chunks + run - 1) / run;
  auto attend = [&](int64_t task, int thread) {
    const int64_t head = task / runs, b = head / a.G, begin = task % runs * run;
    const KeyRange all_keys = keys_of_item(a, b);
    const int64_t first = chunks_of(b).first;
    for (int64_t c = begin; c < begin + run && c < chunks; c++) {
      const KeyRange keys = KeyRange{(first + c) * length, (first + c + 1) * length}.within(all_keys);
      if (!keys.empty()) attend_chunk<T>(a, b, head % a.G, keys, rows, scratch.of[thread], partial(head, c));
    }
  };
  auto merge = [&](int64_t task, int thread) {
    const int64_t b = task / a.H, h = task % a.H, head = b * a.G + h / group;
    const KeyRange own = chunks_of(b);
    for (int64_t query = 0; query < a.N; query++) {
      StepPartial of = partial(head, 0);
      const int64_t row = query * group + h % group;
      of = {of.out + row * E, of.highest + row, of.total + row};
      merge_chunks<T>(a, b, h, query, own.end - own.first, of, rows, merging.of[thread].sums,
                      merging.of[thread].narrow_sums);
    }
  };
  parallel_stages(a.threads, Stage{heads * runs, attend}, Stage{a.B * a.H, merge});
  return arena.used;
}

static int64_t steps_forward(const Steps &a, void *workspace) {
  return by_dtype(a.dtype, [&](auto x) { return steps_forward_of<decltype(x)>(a, workspace); });
}
