// Attention in one softmax over the exact keys of a query's cluster and a tail of cells, in four stages:
//
//     lists       per head: queries sorted by cluster, with the means, and their covariance W inside clusters; per key
//                 head: keys sorted by cell, packed
//     terms       per head: what is added to the logits of the means to choose the top keys, ln ‖k − mean of its cell‖ +
//                 min(scale²·(k − k̄)ᵀW(k − k̄) / 2, 8), so that the mean over the members of a key's weight counts
//     centroids   per head and block of means: logits with all keys, the top keys, and for each cell, of the keys that are
//                 left, one key, one value and the log-sum-exp
//     members     per head and few clusters: each query's attention to its cluster's top keys and cells
//
// If no gradient is needed, the cells of a block of means stay in the cache: the members of its clusters come next.
//
// A block of means is as many lanes; keys are rows, sorted by cell, so that a cell is a run of rows:
//
//                 means, lanes →
//               ┌────────────────┐
//     keys of   │ logits K·q̄ᵀ    │  a top key's logit becomes −∞ once it is chosen; then down each column the softmax, and
//     a cell ↓  │                │  its transpose × keys and × values → k̄ and v̄ of the cell, one row a mean
//               ├────────────────┤
//     next cell │                │
//
// The block's logits are stored: top keys are taken out before the sums, not from the sums, which could cancel.

constexpr float NEAREST = 1e-37f, FARTHEST = 3e38f;  // of squared distances to the mean of a cell: their ln is finite
constexpr float MOST_AROUND = 8;                     // of scale²·(k − k̄)ᵀW(k − k̄) / 2
constexpr int64_t LOGITS = 1 << 17;  // of a block of means, which should stay in the cache

// Keys and values of the key heads of a wave in the order of the cells, as products take them (`pairs.hpp`): floats, or
// pairs of bf16. Waves of key heads go one after the other, so that what is packed is still in the cache when it is read.
template <class Number>
struct SortedKeys {
  static constexpr bool PAIRED = __is_same(Number, Pair);
  Pieces<Number> keys, values;              // (M,D'), (M,E'), for products along the rows
  Pieces<Number> key_steps, value_steps;    // the same for products over the rows of a cell, which begins a step
  Pieces<int32_t> place;  // (M) place of each key in that order; −1 for one in no cell
  Pieces<float> spread;   // (M) ln of each key's distance to the mean of its cell
  Pieces<float> mean;     // (D') of the keys
  Pieces<float> around;   // of a query head: (D,D') the covariance of its queries inside their clusters
  Pieces<float> terms;    // of a query head: (M) what is added to the logits to choose top keys
  int64_t D, E;           // numbers of a row along which a product runs

  SortedKeys(Arena &arena, const TailInputs &in, int64_t heads) {
    const int64_t group = in.H / in.G, steps = (in.M + in.cells) / 2;
    D = round_up(steps_of<Number>(in.D), W);
    E = round_up(steps_of<Number>(in.E), W);
    keys = arena.take_each<Number>(heads, in.M * D);
    values = arena.take_each<Number>(heads, in.M * E);
    key_steps = PAIRED ? arena.take_each<Number>(heads, steps * round_up(in.D, W)) : keys;
    value_steps = PAIRED ? arena.take_each<Number>(heads, steps * round_up(in.E, W)) : values;
    place = arena.take_each<int32_t>(heads, in.M);
    spread = arena.take_each<float>(heads, in.M);
    mean = arena.take_each<float>(heads, round_up(in.D, W));
    around = arena.take_each<float>(heads * group, in.D * round_up(in.D, W));
    terms = arena.take_each<float>(heads * group, in.M);
  }

  // The step with which cell x begins, where keys [from, …) are its.
  static int64_t step_at(int64_t from, int64_t x) { return PAIRED ? (from + x) / 2 : from; }
};

// How many means a block has: whole vectors, fewer where there are many keys.
static int64_t lanes_of(const TailInputs &in) {
  const int64_t few = LOGITS / (in.M > 0 ? in.M : 1) / W * W, least = 2 * W < 32 ? 32 : 2 * W;
  const int64_t lanes = few < least ? least : few > 64 ? 64 : few, all = round_up(in.clusters, W);
  return lanes < all ? lanes : all;
}

// The best keys of each lane so far, in the order of the rows.
struct LaneCandidates {
  Pieces<float> logits;   // a lane: (room)
  Pieces<int32_t> ranks;  // a lane: (room)
  float *bound;           // (lanes)
  float *sample;          // (room,W)
  int32_t *found, *numbers;
  int64_t room;

  LaneCandidates(Arena &arena, int64_t lanes, int64_t K) {
    room = CentroidScratch::room_for(K);
    logits = arena.take_each<float>(lanes, room);
    ranks = arena.take_each<int32_t>(lanes, room);
    bound = arena.take<float>(lanes);
    sample = arena.take<float>(room * W);
    found = arena.take<int32_t>(lanes);
    numbers = arena.take<int32_t>(room * W);
  }
};

// The cells of the clusters from `first` on, counted over all heads.
struct CellRows {
  float *keys, *values, *lse, *residual;  // as in TailSaved
  int64_t first;

  static CellRows saved(const TailSaved &of) {
    return {of.cell_keys, of.cell_values, of.cell_lse, of.cell_residual, 0};
  }
  int64_t at(const TailInputs &in, int64_t row, int64_t x) const { return (row - first) * in.cells + x; }
};

template <class Number>
struct BlockScratch {
  float *rows;             // (lanes,D') scratch of rows
  float *apart;            // (lanes,D'), and at least (E')
  Number *means, *queries; // (lanes,D') the means, and transposed
  float *logits;           // (M,lanes), and the weights
  float *highest, *total;  // (lanes)
  float *out;              // (lanes,max(D',E'))
  uint8_t *marks;          // (M)
  CellRows cells;          // of a block, where nobody wants them later
  LaneCandidates best;

  BlockScratch(Arena &arena, const TailInputs &in, int64_t lanes, bool saves)
      : best(arena, lanes, in.topk < in.M ? in.topk : in.M) {
    const int64_t D = round_up(in.D, W), E = round_up(in.E, W);
    rows = arena.take<float>(lanes * D);
    apart = arena.take<float>(lanes * D > E ? lanes * D : E);
    means = arena.take<Number>(lanes * D);
    queries = arena.take<Number>(lanes * D);
    logits = arena.take<float>(in.M * lanes);
    highest = arena.take<float>(lanes);
    total = arena.take<float>(lanes);
    out = arena.take<float>(lanes * (D > E ? D : E));
    marks = arena.take<uint8_t>(in.M);
    const int64_t kept = saves ? 0 : lanes * in.cells;
    cells = {arena.take<float>(kept * in.D), arena.take<float>(kept * in.E), arena.take<float>(kept),
             arena.take<float>(kept), 0};
  }
};

// Stable counting sort of tokens by label; a label of `groups` is none. `offsets` (groups+1) are the starts of the groups.
static void sort_tokens(const int64_t *labels, int64_t tokens, int64_t groups, int32_t *order, int32_t *offsets) {
  for (int64_t c = 0; c <= groups; c++) offsets[c] = 0;
  for (int64_t i = 0; i < tokens; i++)
    if (labels[i] < groups) offsets[labels[i] + 1]++;
  for (int64_t c = 0; c < groups; c++) offsets[c + 1] += offsets[c];
  for (int64_t i = 0; i < tokens; i++)
    if (labels[i] < groups) order[offsets[labels[i]]++] = (int32_t)i;
  for (int64_t c = groups; c > 0; c--) offsets[c] = offsets[c - 1];  // filling moved each start to the next one's
  offsets[0] = 0;
  for (int64_t i = offsets[groups]; i < tokens; i++) order[i] = 0;
}

static bool labels_hold(const TailInputs &in) {
  bool hold = true;
  for (int64_t i = 0; i < in.B * in.H * in.N; i++) hold &= (uint64_t)in.labels[i] <= (uint64_t)in.clusters;
  for (int64_t i = 0; i < in.B * in.G * in.M; i++) hold &= (uint64_t)in.cell[i] <= (uint64_t)in.cells;
  return hold;
}

// The keys and values of a key head, `count` of which are in cells that start at `cells`.
template <class T, class Number>
static void pack_keys(const TailInputs &in, const int32_t *order, const int32_t *cells, int64_t bg, int64_t at,
                      const SortedKeys<Number> &to) {
  const int64_t b = bg / in.G, g = bg % in.G, count = cells[in.cells];
  if constexpr (!SortedKeys<Number>::PAIRED) {
    pack_rows<T>(in.key, b, g, order, 0, count, in.D, to.keys[at], to.D);
    pack_rows<T>(in.value, b, g, order, 0, count, in.E, to.values[at], to.E);
  } else {
    pack_factor_rows<T>(in.key, b, g, order, 0, count, in.D, to.keys[at], to.D);
    pack_factor_rows<T>(in.value, b, g, order, 0, count, in.E, to.values[at], to.E);
    auto pair = [&](const Pair *rows, int64_t row, int64_t width, Pair *steps) {
      const int64_t wide = round_up(width, W);
      for (int64_t x = 0; x < in.cells; x++) {
        Pair *step = steps + to.step_at(cells[x], x) * wide;
        for (int64_t i = cells[x]; i < cells[x + 1]; i += 2, step += wide)
          pair_rows(rows + i * row, i + 1 < cells[x + 1] ? rows + (i + 1) * row : nullptr, width, step, wide);
      }
    };
    pair(to.keys[at], to.D, in.D, to.key_steps[at]);
    pair(to.values[at], to.E, in.E, to.value_steps[at]);
  }
}

// A head's queries by cluster, the means of the clusters where they are not known, and nothing for queries in none.
template <class T>
static void sort_queries(const TailForward &a, int64_t b, int64_t h) {
  const TailInputs &in = a.inputs;
  const int64_t bh = b * in.H + h;
  const int64_t *labels = in.labels + bh * in.N;
  int32_t *order = a.saved.order + bh * in.N, *offsets = a.saved.offsets + bh * (in.clusters + 1);
  sort_tokens(labels, in.N, in.clusters, order, offsets);
  for (int64_t c = 0; c < in.clusters; c++) {
    const int64_t row = (bh * in.clusters + c) * in.D;
    if (a.means) load_row(a.means + row, in.D, a.saved.centroids + row, in.D);
    else mean_row<T>(in.query, b, h, order + offsets[c], offsets[c + 1] - offsets[c], in.D, a.saved.centroids + row);
    // The expansion holds around any vector: around one that products take as it is.
    for (int64_t d = 0; Factor<T>::PAIRED && d < in.D; d++) {
      bf16 rounded;
      narrow(a.saved.centroids[row + d], &rounded);
      a.saved.centroids[row + d] = widen(rounded);
    }
  }
  for (int64_t i = 0; i < in.N; i++) {
    if (labels[i] < in.clusters) continue;
    T *row = row_of<T>(a.out, b, h, i);
    for (int64_t e = 0; e < in.E; e++) narrow(0.0f, row + e);
    a.lse[bh * in.N + i] = -__builtin_inff();
    if (!a.saved.shifts) continue;
    zero(a.saved.shifts + (bh * in.N + i) * in.cells, in.cells);
    a.saved.kept[bh * in.N + i] = a.saved.residual[bh * in.N + i] = 0;
  }
}

// W of a head, whose queries are sorted: `tile` is scratch of `rows` times D'.
template <class T>
static void covariance_around(const TailForward &a, int64_t b, int64_t h, float *tile, int64_t rows, float *to) {
  const TailInputs &in = a.inputs;
  const int64_t D = round_up(in.D, W), bh = b * in.H + h;
  const int32_t *order = a.saved.order + bh * in.N, *offsets = a.saved.offsets + bh * (in.clusters + 1);
  if (a.around) {
    for (int64_t d = 0; d < in.D; d++) load_row(a.around + (bh * in.D + d) * in.D, in.D, to + d * D, D);
    return;
  }
  zero(to, in.D * D);
  int64_t filled = 0;
  for (int64_t c = 0; c < in.clusters; c++) {
    const float *mean = a.saved.centroids + (bh * in.clusters + c) * in.D;
    for (int64_t i = offsets[c]; i < offsets[c + 1]; i++) {
      float *row = tile + filled * D;
      load_row(row_of<T>(in.query, b, h, order[i]), in.D, row, D);
      for (int64_t d = 0; d < in.D; d++) row[d] -= mean[d];
      if (++filled == rows) {
        gemm(in.D, D, filled, tile, 1, D, tile, D, to, D, true);
        filled = 0;
      }
    }
  }
  if (filled) gemm(in.D, D, filled, tile, 1, D, tile, D, to, D, true);
  const float norm = offsets[in.clusters] ? 1 / (float)offsets[in.clusters] : 1;
  for (int64_t i = 0; i < in.D * D; i++) to[i] *= norm;
}

// What is added to the logits of a head's means, in the order of the keys. `tile` and `apart` are scratch of `rows`
// times D'.
template <class Number>
static void terms_of_head(const TailForward &a, const SortedKeys<Number> &sorted, int64_t at, int64_t head, int64_t bh,
                          int64_t count, float *tile, float *apart, int64_t rows) {
  const TailInputs &in = a.inputs;
  const int64_t D = round_up(in.D, W);
  const float *mean = sorted.mean[at], half = in.scale * in.scale / 2;
  float *terms = sorted.terms[head];
  if (a.terms) {
    for (int64_t j = 0; j < in.M; j++)
      if (sorted.place[at][j] >= 0) terms[sorted.place[at][j]] = a.terms[bh * in.M + j];
    return;
  }
  for (int64_t first = 0; first < count; first += rows) {
    const int64_t now = count - first < rows ? count - first : rows;
    for (int64_t i = 0; i < now; i++) {
      const float *key = as_floats(sorted.keys[at] + (first + i) * sorted.D, D, apart + i * D);
      for (int64_t d = 0; d < D; d += W) store(apart + i * D + d, load(key + d) - load(mean + d));
    }
    gemm(now, D, in.D, apart, D, 1, sorted.around[head], D, tile, D, false);
    for (int64_t i = 0; i < now; i++) {
      vf products = {};
      for (int64_t d = 0; d < D; d += W) products += load(tile + i * D + d) * load(apart + i * D + d);
      const float square = sum(products) * half, held = square > MOST_AROUND ? MOST_AROUND : square;
      terms[first + i] = sorted.spread[at][first + i] + (square - square == 0 ? held : 0);  // finite: ∞ − ∞ is NaN
    }
  }
}

// ln ‖k − mean of its cell‖ of each key, in their order. `mean` and `spare` are scratch of D'.
template <class Number>
static void spread_of_cells(const TailInputs &in, const Number *keys, int64_t row, const int32_t *cells, float *mean,
                            float *spare, float *spread) {
  const int64_t D = round_up(in.D, W);
  for (int64_t x = 0; x < in.cells; x++) {
    const float norm = 1 / (float)(cells[x + 1] - cells[x]);
    zero(mean, D);
    for (int64_t i = cells[x]; i < cells[x + 1]; i++) {
      const float *key = as_floats(keys + i * row, D, spare);
      for (int64_t d = 0; d < D; d += W) store(mean + d, load(mean + d) + load(key + d));
    }
    for (int64_t i = cells[x]; i < cells[x + 1]; i++) {
      const float *key = as_floats(keys + i * row, D, spare);
      vf squares = {};
      for (int64_t d = 0; d < D; d += W) {
        const vf apart = load(key + d) - load(mean + d) * norm;
        squares += apart * apart;
      }
      const float square = sum(squares);
      const float held = square < NEAREST ? NEAREST : square > FARTHEST ? FARTHEST : square;
      spread[i] = held == held ? 0.5f * __builtin_logf(held) : 0;  // what is not finite decides no choice
    }
  }
}

template <class Number>
static void mean_of_keys(const Number *keys, int64_t row, int64_t count, int64_t D, float *spare, float *mean) {
  const float norm = count > 0 ? 1 / (float)count : 0;
  zero(mean, D);
  for (int64_t i = 0; i < count; i++) {
    const float *key = as_floats(keys + i * row, D, spare);
    for (int64_t d = 0; d < D; d += W) store(mean + d, load(mean + d) + load(key + d));
  }
  for (int64_t d = 0; d < D; d += W) store(mean + d, load(mean + d) * norm);
}

static int64_t wanted_of(const TailForward &a, int64_t b) {
  const int64_t topk = a.inputs.topk, wanted = a.wanted ? a.wanted[b] : topk;
  return wanted < 0 ? 0 : wanted < topk ? wanted : topk;
}

#if defined(__AVX512F__)
// Rows whose logit plus term exceeds a lane's bound join its candidates: tiles are turned, so that a lane's numbers are
// one vector, from which one instruction takes those that exceed. No branch depends on the data.
static void take_rows(const LaneCandidates &best, const float *logits, const float *terms, int64_t lanes, int64_t count,
                      int64_t K) {
  const __m512i ramp = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t first = 0; first < count; first += W) {
    const int64_t rows = count - first < W ? count - first : W;
    const __m512i ranks = _mm512_add_epi32(ramp, _mm512_set1_epi32((int32_t)first));
    for (int64_t v = 0; v < lanes; v += W) {
      vf tile[W];
      UNROLL for (int i = 0; i < W; i++)
        tile[i] = i < rows ? load(logits + (first + i) * lanes + v) + terms[first + i] : splat(-__builtin_inff());
      transpose(tile);
      UNROLL for (int lane = 0; lane < W; lane++) {
        const int64_t c = v + lane;
        const __mmask16 better = _mm512_cmp_ps_mask((__m512)tile[lane], _mm512_set1_ps(best.bound[c]), _CMP_GT_OQ);
        _mm512_storeu_ps(best.logits[c] + best.found[c], _mm512_maskz_compress_ps(better, (__m512)tile[lane]));
        _mm512_storeu_si512(best.ranks[c] + best.found[c], _mm512_maskz_compress_epi32(better, ranks));
        best.found[c] += __builtin_popcount(better);
      }
      for (int64_t c = v; c < v + W; c++)
        if (best.found[c] + 2 * W > best.room) prune(best, c, K);
    }
  }
}
#else
// Rows whose logit plus term exceeds a lane's bound join its candidates. A word for each lane collects which of 32 rows
// do, so that the branches that nobody can predict come once a candidate and lane, not once a row:
//
//              lanes →
//             ┌───────┐
//     32 rows │ 1 0 0 │   the word of the first lane has bits 0 and 2
//        ↓    │ 0 0 1 │
//             │ 1 0 0 │
//             └───────┘
static void take_rows(const LaneCandidates &best, const float *logits, const float *terms, int64_t lanes, int64_t count,
                      int64_t K) {
  constexpr int64_t BITS = 32;
  for (int64_t first = 0; first < count; first += BITS) {
    const int64_t rows = count - first < BITS ? count - first : BITS;
    const float *tile = logits + first * lanes;
    for (int64_t v = 0; v < lanes; v += W) {
      const vf bound = load(best.bound + v);
      vi words = {};
      for (int64_t i = 0; i < rows; i++)
        words |= (load(tile + i * lanes + v) + terms[first + i] > bound) & (int32_t)(1u << i);
      for (int lane = 0; lane < W; lane++) {
        const int64_t c = v + lane;
        uint32_t word = (uint32_t)words[lane];
        if (!word) continue;  // a list that takes nothing keeps its bound, which pruning would lower
        if (best.found[c] + BITS > best.room) prune(best, c, K);
        int64_t found = best.found[c];
        for (; word; word &= word - 1, found++) {
          const int i = __builtin_ctz(word);
          best.logits[c][found] = tile[i * lanes + c] + terms[first + i];
          best.ranks[c][found] = (int32_t)(first + i);
        }
        best.found[c] = (int32_t)found;
      }
    }
  }
}
#endif

// The `K` rows with the largest logit plus term in each of `C` lanes, as candidates in ascending order. A bound from
// evenly spaced rows lets somewhat more pass; a lane in which too few pass it starts again without one.
template <class Number>
static void choose_top(const BlockScratch<Number> &own, const float *terms, int64_t C, int64_t lanes, int64_t count,
                       int64_t K) {
  const LaneCandidates &best = own.best;
  const int64_t sample = count < best.room ? count : best.room, step = count / sample;
  const float expected = (float)(K * sample) / (float)count;  // top keys among the sample, give or take its root
  const int64_t among = (int64_t)(expected + 2.5f * __builtin_sqrtf(expected)) + 2;
  const int64_t wanted = step == 1 || among > K ? K : among;
  for (int64_t v = 0; v < lanes; v += W) {
    vf bound = splat(-__builtin_inff());
    if (wanted < sample) {
      for (int64_t i = 0; i < sample; i++)
        store(best.sample + i * W, load(own.logits + i * step * lanes + v) + terms[i * step]);
      bound = bound_of_columns(best.sample, W, sample, wanted, best.numbers);
    }
    for (int lane = 0; lane < W; lane++) {
      best.bound[v + lane] = v + lane < C ? bound[lane] : __builtin_inff();
      best.found[v + lane] = 0;
    }
  }
  take_rows(best, own.logits, terms, lanes, count, K);
  bool again = false;
  for (int64_t c = 0; c < C; c++) {
    const bool few = best.found[c] < K;
    again |= few;
    best.bound[c] = few ? -__builtin_inff() : __builtin_inff();
    if (few) best.found[c] = 0;
  }
  if (again) take_rows(best, own.logits, terms, lanes, count, K);
  for (int64_t c = 0; c < C; c++) {
    if (best.found[c] > K) prune(best, c, K);
    if (best.found[c] < K) make_up(best.logits[c], best.ranks[c], best.found[c], K);
  }
}

// Places of the exact keys of cluster `row`, ascending, −1 behind the last: those listed, all, or the candidates.
static void save_top(const TailForward &a, int64_t row, int64_t K, int64_t count, const int32_t *place,
                     const int32_t *ranks, uint8_t *marks) {
  const TailInputs &in = a.inputs;
  int32_t *top = a.saved.top + row * in.topk;
  int64_t kept = 0;
  if (a.keys) {
    for (int64_t i = 0; i < count; i++) marks[i] = 0;
    for (int64_t k = 0; k < in.topk; k++) {
      const int64_t token = a.keys[row * in.topk + k];
      if ((uint64_t)token < (uint64_t)in.M && place[token] >= 0) marks[place[token]] = 1;
    }
    for (int64_t i = 0; i < count && kept < in.topk; i++)
      if (marks[i]) top[kept++] = (int32_t)i;
  } else {
    for (; kept < K && kept < count; kept++) top[kept] = K < count ? ranks[kept] : (int32_t)kept;
  }
  for (; kept < in.topk; kept++) top[kept] = -1;
}

// The sum of one mean's cell again, key by key: a key that is exact has no part in it, but 0·∞ is NaN. `spare` is scratch
// of a row.
template <class Number>
static void sum_met(const TailForward &a, const Number *rows, int64_t along, int64_t from, int64_t to, int64_t row,
                    const Number *weights, int64_t lanes, int64_t lane, int64_t wide, float *spare, float *out) {
  const int32_t *top = a.saved.top + row * a.inputs.topk;
  zero(out, wide);
  for (int64_t i = from, k = 0; i < to; i++) {
    while (k < a.inputs.topk && top[k] >= 0 && top[k] < i) k++;
    if (k < a.inputs.topk && top[k] == i) continue;
    const float *x = as_floats(rows + (i - from) * along, wide, spare), weight = number_at(weights, i - from, lanes, lane);
    for (int64_t d = 0; d < wide; d++) out[d] += weight * x[d];
  }
}

// A cell's logits to weights, in their place.
template <class Number>
static void weigh_cell(int64_t count, int64_t lanes, float *logits, const BlockScratch<Number> &own) {
  for (int64_t v = 0; v < lanes; v += W) {
    vf high = splat(LOWEST), total = {};
    for (int64_t i = 0; i < count; i++) high = maximum(load(logits + i * lanes + v), high);
    auto weight = [&](int64_t i) {
      const vf p = weight_of<Number>(load(logits + i * lanes + v) - high);
      total += p;
      return p;
    };
    if constexpr (__is_same(Number, Pair)) {
      for (int64_t i = 0; i < count; i += 2) {
        const vf p = weight(i);
        store((Pair *)logits + i / 2 * lanes + v, paired(p, i + 1 < count ? weight(i + 1) : vf{}));
      }
    } else {
      for (int64_t i = 0; i < count; i++) store(logits + i * lanes + v, weight(i));
    }
    store(own.highest + v, high);
    store(own.total + v, total);
  }
}

// One cell, keys [from, to) in the order of the cells, as the means of the block's clusters see it.
template <class Number>
static void sum_cell(const TailForward &a, const SortedKeys<Number> &sorted, int64_t at, int64_t from, int64_t to,
                     int64_t x, int64_t first_row, int64_t C, int64_t lanes, const BlockScratch<Number> &own,
                     const CellRows &cells) {
  const TailInputs &in = a.inputs;
  const int64_t count = to - from, step = sorted.step_at(from, x);
  weigh_cell(count, lanes, own.logits + from * lanes, own);
  const Number *weights = (const Number *)(own.logits + from * lanes);
  // The sums are divided by the total, not the weights: there are fewer of them. SHRUNK keeps them finite.
  auto save = [&](const Number *rows, int64_t along, const Number *steps, int64_t width, float *saved) {
    const int64_t wide = round_up(width, W);
    for (int64_t c = 0; c < C; c++) ask_for(saved + cells.at(in, first_row + c, x) * width, width * 4);
    gemm(round_up(C, TILE_ROWS), wide, steps_of<Number>(count), weights, 1, lanes, steps + step * wide, wide, own.out,
         wide, false);
    for (int64_t c = 0; c < C; c++) {
      float *out = own.out + c * wide;
      const float norm = own.total[c] == 0 ? 0 : 1 / own.total[c];
      if (!scale_row(out, wide, norm)) {
        sum_met(a, rows + from * along, along, from, to, first_row + c, weights, lanes, c, wide, own.apart, out);
        scale_row(out, wide, norm);
      }
      store_row(out, width, saved + cells.at(in, first_row + c, x) * width);
    }
  };
  save(sorted.keys[at], sorted.D, sorted.key_steps[at], in.D, cells.keys);
  save(sorted.values[at], sorted.E, sorted.value_steps[at], in.E, cells.values);
  for (int64_t c = 0; c < C; c++) {
    const int64_t at = cells.at(in, first_row + c, x);
    const float total = own.total[c] * GROWN, log_total = __builtin_logf(total);
    cells.lse[at] = total == 0 ? -__builtin_inff() : own.highest[c] + log_total;
    cells.residual[at] = residual_of(cells.lse[at], own.highest[c], log_total);
  }
}

static bool chooses_keys(const TailForward &a, int64_t b, int64_t count) {
  const int64_t K = wanted_of(a, b);
  return !a.keys && 0 < K && K < count;
}

// Clusters [first, last) of one head: their top keys, and all cells.
template <class Number>
static void attend_block(const TailForward &a, const SortedKeys<Number> &sorted, const float *terms, int64_t at,
                         int64_t bh, int64_t first, int64_t last, const BlockScratch<Number> &own, const CellRows &to) {
  const TailInputs &in = a.inputs;
  const int64_t b = bh / in.H, bg = b * in.G + bh % in.H / (in.H / in.G), C = last - first, D = sorted.D;
  const int64_t row = bh * in.clusters + first, columns = round_up(C, W), steps = steps_of<Number>(in.D);
  const int32_t *cells = a.saved.cell_offsets + bg * (in.cells + 1);
  const int64_t count = cells[in.cells];
  for (int64_t c = 0; c < C; c++) round_row(a.saved.centroids + (row + c) * in.D, in.D, own.means + c * D, D);
  for (int64_t i = C * D; i < columns * D; i++) own.means[i] = {};
  pack_factors_across(own.means, columns, steps, D, own.queries, columns);
  gemm(count, columns, steps, sorted.keys[at], D, 1, own.queries, columns, own.logits, columns, false, in.scale);
  const int64_t K = wanted_of(a, b);
  if (chooses_keys(a, b, count)) choose_top(own, terms, C, columns, count, K);
  for (int64_t c = 0; c < C; c++) {
    save_top(a, row + c, K, count, sorted.place[at], own.best.ranks[c], own.marks);
    const int32_t *top = a.saved.top + (row + c) * in.topk;
    for (int64_t k = 0; k < in.topk && top[k] >= 0; k++) own.logits[top[k] * columns + c] = -__builtin_inff();
  }
  for (int64_t x = 0; x < in.cells; x++)
    sum_cell(a, sorted, at, cells[x], cells[x + 1], x, row, C, columns, own, to);
}

// What a cluster's members meet: top keys, then cells, filled up to whole vectors. For the products the keys are packed
// across, and the values stay where they are.
struct MetScratch {
  const float **key_rows, **value_rows;  // (L') where each row is
  float *spare;    // (2·L',D' or E') for rows of the caller that end inside a vector; empty where none does
  float *nothing;  // (D' or E') zeros
  float *keys;     // (D,L')
  float *bias;     // (L') 0 for a key, ln Σ e^{scale·q̄·k} − scale·q̄·k̄ for a cell, −∞ for the filling

  static int64_t lanes_of(const TailInputs &in) { return round_up(in.topk + in.cells, W); }
  static int64_t cells_at(int64_t K) { return K; }  // where the cells begin, behind K keys

  MetScratch(Arena &arena, const TailInputs &in) {
    const int64_t L = lanes_of(in), D = round_up(in.D, W), E = round_up(in.E, W), most = D > E ? D : E;
    key_rows = arena.take<const float *>(L);
    value_rows = arena.take<const float *>(L);
    spare = arena.take<float>(D == in.D && E == in.E ? 0 : 2 * L * most);
    nothing = arena.take<float>(most);
    keys = arena.take<float>(D * L);
    bias = arena.take<float>(L);
    if (arena.base) zero(nothing, most);
  }

  // A row of the caller's, filled up to whole vectors.
  static const float *whole_row(const float *row, int64_t width, float *spare) {
    if (width % W == 0) return row;
    load_row(row, width, spare, round_up(width, W));
    return spare;
  }

  // Row `i` of what is met is this key and this value of the caller's.
  void take(int64_t i, const float *key, int64_t D, const float *value, int64_t E) const {
    const int64_t most = round_up(D > E ? D : E, W);
    key_rows[i] = whole_row(key, D, spare + 2 * i * most);
    value_rows[i] = whole_row(value, E, spare + (2 * i + 1) * most);
  }

  // Fills up to whole vectors behind `count` rows, and packs the keys.
  void fill_up(int64_t count, int64_t D) const {
    const int64_t lanes = round_up(count, W);
    for (int64_t i = count; i < lanes; i++) {
      key_rows[i] = value_rows[i] = nothing;
      bias[i] = -__builtin_inff();
    }
    pack_across(lanes, D, keys, lanes, [&](int64_t i) { return key_rows[i]; });
  }
};

static float inner(const float *a, const float *b, int64_t width) {
  vf sums = {};
  int64_t d = 0;
  for (; d + W <= width; d += W) sums += load(a + d) * load(b + d);
  float total = sum(sums);
  for (; d < width; d++) total += a[d] * b[d];
  return total;
}

// Packs them for cluster `row`; returns how many top keys there are.
static int64_t pack_met(const TailInputs &in, const TailSaved &saved, const CellRows &cells, const float *keys,
                        const float *values, int64_t row, const MetScratch &to) {
  const int64_t D = round_up(in.D, W), E = round_up(in.E, W), X = in.cells;
  const int32_t *top = saved.top + row * in.topk;
  int64_t K = 0;
  for (; K < in.topk && top[K] >= 0; K++) {
    if (K + AHEAD < in.topk && top[K + AHEAD] >= 0) ask_for(keys + top[K + AHEAD] * D, D * 4);
    ask_for(values + top[K] * E, E * 4);
    to.key_rows[K] = keys + top[K] * D;
    to.value_rows[K] = values + top[K] * E;
    to.bias[K] = 0;
  }
  for (int64_t x = 0; x < X; x++) {
    const int64_t at = cells.at(in, row, x);
    const float *key = cells.keys + at * in.D;
    to.take(K + x, key, in.D, cells.values + at * in.E, in.E);
    to.bias[K + x] = cells.lse[at] - inner(key, saved.centroids + row * in.D, in.D) * in.scale;
  }
  to.fill_up(K + X, in.D);
  return K;
}

// The same in pairs of bf16; values are packed too, over the rows.
struct PairedMet {
  const Pair **key_rows, **value_rows;  // (L') where each row is
  Pair *cell_keys, *cell_values;        // (X,D'), (X,E') the cells, rounded
  Pair *nothing;                        // (D' or E') zeros
  Pair *keys, *values;                  // (D',L'), (L',E')
  float *bias, *row;                    // (L'), (D')

  static int64_t lanes_of(const TailInputs &in) { return round_up(cells_at(in.topk) + in.cells, 2 * W); }
  static int64_t cells_at(int64_t K) { return round_up(K, 2); }  // with a step of a product

  PairedMet(Arena &arena, const TailInputs &in) {
    const int64_t L = lanes_of(in), D = round_up(in.D, 2 * W) / 2, E = round_up(in.E, 2 * W) / 2, most = D > E ? D : E;
    key_rows = arena.take<const Pair *>(L);
    value_rows = arena.take<const Pair *>(L);
    cell_keys = arena.take<Pair>(in.cells * D);
    cell_values = arena.take<Pair>(in.cells * E);
    nothing = arena.take<Pair>(most);
    keys = arena.take<Pair>(D * L);
    values = arena.take<Pair>(L / 2 * round_up(in.E, W));
    bias = arena.take<float>(L);
    row = arena.take<float>(2 * D);
    for (int64_t d = 0; arena.base && d < most; d++) nothing[d] = {};
  }
};

static int64_t pack_met(const TailInputs &in, const TailSaved &saved, const CellRows &cells, const Pair *keys,
                        const Pair *values, int64_t row, const PairedMet &to) {
  const int64_t D = round_up(in.D, 2 * W) / 2, E = round_up(in.E, 2 * W) / 2, X = in.cells, wide = round_up(in.E, W);
  const int32_t *top = saved.top + row * in.topk;
  int64_t K = 0;
  for (; K < in.topk && top[K] >= 0; K++) {
    if (K + AHEAD < in.topk && top[K + AHEAD] >= 0) ask_for(keys + top[K + AHEAD] * D, D * 4);
    ask_for(values + top[K] * E, E * 4);
    to.key_rows[K] = keys + top[K] * D;
    to.value_rows[K] = values + top[K] * E;
    to.bias[K] = 0;
  }
  for (int64_t x = 0; x < X; x++) {
    const int64_t at = cells.at(in, row, x), i = to.cells_at(K) + x;
    Pair *key = to.cell_keys + x * D, *value = to.cell_values + x * E;
    round_row(cells.keys + at * in.D, in.D, key, D);
    round_row(cells.values + at * in.E, in.E, value, E);
    to.key_rows[i] = key;
    to.value_rows[i] = value;
    const float *rounded = as_floats(key, 2 * D, to.row);  // the bias is of the key that the products have
    to.bias[i] = cells.lse[at] - inner(rounded, saved.centroids + row * in.D, in.D) * in.scale;
  }
  const int64_t all = to.cells_at(K) + X, lanes = round_up(all, 2 * W);
  auto fill = [&](int64_t i) {
    to.key_rows[i] = to.value_rows[i] = to.nothing;
    to.bias[i] = -__builtin_inff();
  };
  if (K < to.cells_at(K)) fill(K);
  for (int64_t i = all; i < lanes; i++) fill(i);
  pack_across(lanes, steps_of<Pair>(in.D), (float *)to.keys, lanes,
              [&](int64_t i) { return (const float *)to.key_rows[i]; });
  for (int64_t i = 0; i < lanes; i += 2)
    pair_rows(to.value_rows[i], to.value_rows[i + 1], in.E, to.values + i / 2 * wide, wide);
  return K;
}

// Rows of products to 2^−SHRUNK e^{logit − highest}, with logits scale·product + bias. `lse` gets each row's
// log-sum-exp, `norms` what makes a softmax of it. Weights are written over the products; as pairs, half of them.
template <class Number = float>
static void exp_rows(float *rows, int64_t count, int64_t lanes, float scale, const float *bias, float *lse,
                     float *norms) {
  for (int64_t i = 0; i < count; i++) {
    float *row = rows + i * lanes;
    vf high = splat(-__builtin_inff()), total = {};
    for (int64_t j = 0; j < lanes; j += W) {
      const vf logits = load(row + j) * scale + load(bias + j);
      store(row + j, logits);
      high = maximum(logits, high);
    }
    const float top = highest(high);
    auto weight = [&](int64_t j) {
      const vf p = weight_of<Number>(load(row + j) - top);
      total += p;
      return p;
    };
    if constexpr (__is_same(Number, Pair)) {
      for (int64_t j = 0; j < lanes; j += 2 * W) {
        const vf first = weight(j), second = weight(j + W);
        store((Pair *)rows + (i * lanes + j) / 2, paired_neighbours(first, second));
      }
    } else {
      for (int64_t j = 0; j < lanes; j += W) store(row + j, weight(j));
    }
    const float all = sum(total);
    norms[i] = 1 / all;
    lse[i] = top + __builtin_logf(all * GROWN);
  }
}

// Queries of a product, whole blocks of it or, of pairs, whole tiles: their weights stay in the first cache.
template <class Number>
constexpr int64_t TAIL_TILE = __is_same(Number, Pair) && TILE_ROWS > 1 ? 2 * TILE_ROWS : 5 * GEMM_ROWS;

template <class Number>
struct TailMemberScratch {
  using Met = std::conditional_t<__is_same(Number, Pair), PairedMet, MetScratch>;
  Met met;
  Number *queries;        // (TAIL_TILE,D)
  float *weights, *out;   // (TAIL_TILE,L'), (TAIL_TILE,E')
  float *apart;           // (TAIL_TILE,E') with a window the cells' part
  float *lse, *norms;     // (TAIL_TILE)

  TailMemberScratch(Arena &arena, const TailInputs &in) : met(arena, in) {
    constexpr int64_t Q = TAIL_TILE<Number>;
    queries = arena.take<Number>(Q * steps_of<Number>(in.D));
    weights = arena.take<float>(Q * Met::lanes_of(in));
    out = arena.take<float>(Q * round_up(in.E, W));
    apart = arena.take<float>(in.window > 0 ? Q * round_up(in.E, W) : 0);
    lse = arena.take<float>(Q);
    norms = arena.take<float>(Q);
  }
};

// A tile of members, whose queries are packed, to what their cluster meets: `lse`, and rows that `norms` still divides.
static void attend_met(int64_t count, int64_t L, int64_t width, int64_t value_width, float scale,
                       const TailMemberScratch<float> &own) {
  const int64_t lanes = round_up(L, W), E = round_up(value_width, W);
  gemm(count, lanes, width, own.queries, width, 1, own.met.keys, lanes, own.weights, lanes, false);
  exp_rows(own.weights, count, lanes, scale, own.met.bias, own.lse, own.norms);
  gemm_with(count, E, L, own.weights, lanes, 1, ListedRows{own.met.value_rows}, Product{own.out, E, false});
}

// The same in pairs. A template, so that variants which do not multiply them need not compile it.
template <class Number>
static void attend_met(int64_t count, int64_t L, int64_t width, int64_t value_width, float scale,
                       const TailMemberScratch<Number> &own) {
  const int64_t lanes = round_up(L, 2 * W), E = round_up(value_width, W), steps = steps_of<Number>(width);
  const int64_t rows = round_up(count, TILE_ROWS), depth = round_up(steps_of<Number>(L), TILE_ROWS);  // in whole tiles
  gemm(rows, lanes, steps, own.queries, steps, 1, own.met.keys, lanes, own.weights, lanes, false);
  exp_rows<Number>(own.weights, count, lanes, scale, own.met.bias, own.lse, own.norms);
  gemm(rows, E, depth, (const Number *)own.weights, lanes / 2, 1, own.met.values, E, own.out, E, false);
}

// The products of a tile of members with what their cluster meets, and with the values of its top keys and of its cells,
// the one sum and the other: `own.out` and `own.apart`.
template <class Number>
static void attend_met_apart(int64_t count, int64_t K, const TailInputs &in, const float *cell_lse,
                             const float *cell_residual, const int32_t *order, float *shifts, const NearHead &to,
                             const TailMemberScratch<Number> &own) {
  constexpr int64_t unit = __is_same(Number, Pair) ? 2 * W : W;
  const int64_t first = own.met.cells_at(K), lanes = round_up(first + in.cells, unit), E = round_up(in.E, W);
  const int64_t steps = steps_of<Number>(in.D), rows = __is_same(Number, Pair) ? round_up(count, TILE_ROWS) : count;
  gemm(rows, lanes, steps, own.queries, steps, 1, own.met.keys, lanes, own.weights, lanes, false);
  exp_rows_apart<Number>(own.weights, count, lanes, in.scale, own.met.bias, first, in.cells, cell_lse, cell_residual,
                         order, shifts, to);
  if constexpr (__is_same(Number, Pair)) {
    const Number *weights = (const Number *)own.weights;
    gemm(rows, E, first / 2, weights, lanes / 2, 1, own.met.values, E, own.out, E, false);
    gemm(rows, E, steps_of<Number>(in.cells), weights + first / 2, lanes / 2, 1, own.met.values + first / 2 * E, E,
         own.apart, E, false);
  } else {
    gemm_with(count, E, first, own.weights, lanes, 1, ListedRows{own.met.value_rows}, Product{own.out, E, false});
    gemm_with(count, E, in.cells, own.weights + first, lanes, 1, ListedRows{own.met.value_rows + first},
              Product{own.apart, E, false});
  }
}

// The members of a cluster leave what they met for those who look near them.
template <class T>
static void leave_tail_members(const TailForward &a, const SortedKeys<Number<T>> &sorted, const CellRows &cells, int64_t at,
                               int64_t bh, int64_t c, float *shifts, const NearHead &to,
                               const TailMemberScratch<Number<T>> &own) {
  const TailInputs &in = a.inputs;
  const int64_t b = bh / in.H, h = bh % in.H, bg = b * in.G + h / (in.H / in.G), E = round_up(in.E, W);
  const int32_t *order = a.saved.order + bh * in.N, *bounds = a.saved.offsets + bh * (in.clusters + 1) + c;
  constexpr int64_t TILE = TAIL_TILE<Number<T>>;
  if (bounds[0] == bounds[1]) return;
  list_top(in, a.saved, bh, c, to.listed);
  const bool no_keys = a.saved.cell_offsets[bg * (in.cells + 1) + in.cells] == 0;
  const int64_t row = bh * in.clusters + c, cell = cells.at(in, row, 0);
  const int64_t K = no_keys ? 0 : pack_met(in, a.saved, cells, sorted.keys[at], sorted.values[at], row, own.met);
  for (int64_t first = bounds[0]; first < bounds[1]; first += TILE) {
    const int64_t count = bounds[1] - first < TILE ? bounds[1] - first : TILE;
    if (!no_keys) {
      pack_factor_rows<T>(in.query, b, h, order, first, count, in.D, own.queries, steps_of<Number<T>>(in.D));
      attend_met_apart(count, K, in, cells.lse + cell, cells.residual + cell, order + first, shifts, to, own);
    }
    for (int64_t i = 0; i < count; i++) {
      const int64_t query = order[first + i];
      if (no_keys) {
        to.highest[query] = -__builtin_inff();
        to.of_top[query] = to.of_cells[query] = 0;
        zero(shifts + query * in.cells, in.cells);
        zero(to.top_values + query * E, E);
        zero(to.cell_values + query * E, E);
      } else {
        load_row(own.out + i * E, E, to.top_values + query * E, E);
        load_row(own.apart + i * E, E, to.cell_values + query * E, E);
      }
    }
  }
}

template <class T>
static void attend_tail_members(const TailForward &a, const SortedKeys<Number<T>> &sorted, const CellRows &cells,
                                int64_t at, int64_t bh, int64_t c, const TailMemberScratch<Number<T>> &own) {
  const TailInputs &in = a.inputs;
  const int64_t b = bh / in.H, h = bh % in.H, bg = b * in.G + h / (in.H / in.G), width = round_up(in.E, W);
  const int32_t *order = a.saved.order + bh * in.N, *bounds = a.saved.offsets + bh * (in.clusters + 1) + c;
  constexpr int64_t TILE = TAIL_TILE<Number<T>>;
  if (bounds[0] == bounds[1]) return;
  const bool no_keys = a.saved.cell_offsets[bg * (in.cells + 1) + in.cells] == 0;
  const int64_t row = bh * in.clusters + c;
  auto ask_for_queries = [&](int64_t first) {
    const int64_t end = bounds[1] - first < TILE ? bounds[1] : first + TILE;
    for (int64_t i = first; i < end; i++) ask_for(row_of<T>(in.query, b, h, order[i]), in.D * (int64_t)sizeof(T));
  };
  ask_for_queries(bounds[0]);
  const int64_t K = no_keys ? 0 : pack_met(in, a.saved, cells, sorted.keys[at], sorted.values[at], row, own.met);
  for (int64_t first = bounds[0]; first < bounds[1]; first += TILE) {
    const int64_t count = bounds[1] - first < TILE ? bounds[1] - first : TILE;
    for (int64_t i = 0; i < count; i++)  // the products give them time to come
      ask_for(row_of<T>(a.out, b, h, order[first + i]), in.E * (int64_t)sizeof(T));
    ask_for_queries(first + TILE);
    if (no_keys) {
      zero(own.out, count * width);
      for (int64_t i = 0; i < count; i++) {
        own.lse[i] = -__builtin_inff();
        own.norms[i] = 0;
      }
    } else {
      pack_factor_rows<T>(in.query, b, h, order, first, count, in.D, own.queries, steps_of<Number<T>>(in.D));
      attend_met(count, own.met.cells_at(K) + in.cells, in.D, in.E, in.scale, own);
    }
    for (int64_t i = 0; i < count; i++) {
      float *row = own.out + i * width;
      scale_row(row, width, own.norms[i]);
      store_row(row, in.E, row_of<T>(a.out, b, h, order[first + i]));
      a.lse[bh * in.N + order[first + i]] = own.lse[i];
    }
  }
}

// Key heads of a wave.
static int64_t wave_of(const TailInputs &in) {
  const int64_t all = in.B * in.G > 0 ? in.B * in.G : 1;
  return all < 2 * in.threads ? all : 2 * in.threads;
}

template <class T>
static int64_t tail_forward_of(const TailForward &a, void *workspace) {
  const TailInputs &in = a.inputs;
  Arena arena{(char *)workspace};
  const int64_t lanes = lanes_of(in), blocks = (in.clusters + lanes - 1) / lanes, wave = wave_of(in);
  const SortedKeys<Number<T>> sorted(arena, in, wave);
  const bool saves = a.saved.cell_keys;
  const CellRows saved = CellRows::saved(a.saved);
  const PerThread<BlockScratch<Number<T>>> centroids(arena, in.threads, in, lanes, saves);
  const PerThread<TailMemberScratch<Number<T>>> members(arena, in.threads, in);
  const NearKeys near_keys(arena, in, wave, false);
  const Each<NearHead> near(arena, wave * (in.H / in.G), in, !a.saved.shifts);
  const PerThread<NearScratch> near_scratch(arena, in.threads, in);
  const int64_t all = in.B * in.G, waves = (all + wave - 1) / wave;
  Progress *progress = arena.take<Progress>(5 * waves);
  if (!arena.base) return arena.used;
  if (!labels_hold(in)) return BAD_LIST;

  const int64_t group = in.H / in.G, heads = wave * group, step = in.clusters / 16 + 1;
  const int64_t steps = (in.clusters + step - 1) / step;
  // Heads of a wave adjoin, and the last wave may have fewer.
  const Stage lists = {wave + heads, [&](int64_t round, int64_t task, int thread) {
    const int64_t bg = round * wave + task, bh = round * heads + task - wave;
    float *tile = centroids.of[thread].rows;
    if (task >= wave && bh < all * group) {
      sort_queries<T>(a, bh / in.H, bh % in.H);
      if (!a.terms && chooses_keys(a, bh / in.H, in.M))
        covariance_around<T>(a, bh / in.H, bh % in.H, tile, lanes, sorted.around[task - wave]);
    }
    if (task >= wave || bg >= all) return;
    int32_t *order = a.saved.key_order + bg * in.M, *offsets = a.saved.cell_offsets + bg * (in.cells + 1);
    sort_tokens(in.cell + bg * in.M, in.M, in.cells, order, offsets);
    for (int64_t i = 0; i < in.M; i++) sorted.place[task][i] = -1;
    for (int64_t i = 0; i < offsets[in.cells]; i++) sorted.place[task][order[i]] = (int32_t)i;
    float *spare = centroids.of[thread].apart;
    pack_keys<T>(in, order, offsets, bg, task, sorted);
    if (in.window > 0) pack_near_keys<T>(in, bg / in.G, bg % in.G, task, near_keys, false);
    spread_of_cells(in, sorted.keys[task], sorted.D, offsets, tile, spare, sorted.spread[task]);
    mean_of_keys(sorted.keys[task], sorted.D, offsets[in.cells], round_up(in.D, W), spare, sorted.mean[task]);
  }};
  const Stage terms = {heads, [&](int64_t round, int64_t head, int thread) {
    const int64_t bh = round * heads + head, bg = bh / group;
    if (bh >= all * group) return;
    const int64_t count = a.saved.cell_offsets[bg * (in.cells + 1) + in.cells];
    if (chooses_keys(a, bg / in.G, count))
      terms_of_head(a, sorted, head / group, head, bh, count, centroids.of[thread].rows, centroids.of[thread].apart,
                    lanes);
  }};
  auto shifts_of = [&](int64_t head, int64_t bh) {
    return a.saved.shifts ? a.saved.shifts + bh * in.N * in.cells : near.of[head].shifts;
  };
  auto members_of = [&](const CellRows &cells, int64_t head, int64_t bh, int64_t c, int thread) {
    if (in.window == 0) return attend_tail_members<T>(a, sorted, cells, head / group, bh, c, members.of[thread]);
    leave_tail_members<T>(a, sorted, cells, head / group, bh, c, shifts_of(head, bh), near.of[head], members.of[thread]);
  };
  const Stage over_blocks = {heads * blocks, [&](int64_t round, int64_t task, int thread) {
    const int64_t first = task % blocks * lanes, last = first + lanes < in.clusters ? first + lanes : in.clusters;
    const int64_t head = task / blocks, bh = round * heads + head;
    if (bh >= all * group) return;
    const BlockScratch<Number<T>> &own = centroids.of[thread];
    CellRows cells = saves ? saved : own.cells;
    cells.first = saves ? 0 : bh * in.clusters + first;
    attend_block(a, sorted, sorted.terms[head], head / group, bh, first, last, own, cells);
    for (int64_t c = first; !saves && c < last; c++) members_of(cells, head, bh, c, thread);
  }};
  const Stage over_members = {saves ? heads * steps : 0, [&](int64_t round, int64_t task, int thread) {
    const int64_t first = task % steps * step, head = task / steps, bh = round * heads + head;
    for (int64_t c = first; bh < all * group && c < first + step && c < in.clusters; c++)
      members_of(saved, head, bh, c, thread);
  }};
  const int64_t runs = (in.N + NEAR_RUN - 1) / NEAR_RUN;
  const Stage over_near = {in.window > 0 ? heads * runs : 0, [&](int64_t round, int64_t task, int thread) {
    const int64_t head = task / runs, bh = round * heads + head, end = (task % runs + 1) * NEAR_RUN;
    for (int64_t first = end - NEAR_RUN; bh < all * group && first < end && first < in.N; first += NEAR_QUERIES) {
      const int64_t count = in.N - first < NEAR_QUERIES ? in.N - first : NEAR_QUERIES;
      attend_near<T>(a, near_keys, head / group, bh, shifts_of(head, bh), near.of[head], first, count,
                     near_scratch.of[thread]);
    }
  }};
  parallel_rounds(in.threads, waves, progress, lists, terms, over_blocks, over_members, over_near);
  return arena.used;
}

static int64_t tail_forward(const TailForward &a, void *workspace) {
  return by_dtype(a.inputs.dtype, [&](auto x) { return tail_forward_of<decltype(x)>(a, workspace); });
}
