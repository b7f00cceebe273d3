// The forward pass of attention by features:
//
//     m_i = max_r (x_ir + c_r)     φ_ir = e^{x_ir + c_r − m_i}     out_i = Σ_r φ_ir S_r / Σ_r φ_ir z_r
//
// So the denominator is at least 1, or, where a later key of the tile raised c_r, at least e^{−MOST_RISE}; in units of
// 2^−SHRUNK, as S is too, so that no sum of values overflows whose mean does not.

constexpr int64_t PAIR_ROWS = 16;  // of the triangle of pairs, in one product

// φ of queries; m to `high`, and the weight that they give the state to `total`.
static void query_features(const FeatureState &state, const float *exponents, int64_t count, float *features,
                           float *high, float *total) {
  for (int64_t i = 0; i < count; i += W) {
    vf most = splat(-__builtin_inff()), weight = {};
    for (int64_t r = 0; r < state.features; r++)
      most = maximum(load(exponents + r * TILE + i) + state.largest[r], most);
    const vf base = base_of(most);
    for (int64_t r = 0; r < state.features; r++) {
      const vf phi = exp_nonpositive(load(exponents + r * TILE + i) + state.largest[r] - base);
      weight += phi * state.totals[r];
      store(features + r * TILE + i, phi);
    }
    store(high + i, most);
    store(total + i, weight);
  }
}

// The weights of a tile's own keys, up to each query's own: to its total, and their values to out. Of the square of pairs
// only the lower triangle counts; strips of PAIR_ROWS queries leave most of the rest out:
//
//     queries ↓  keys →   ██
//                         ████
//                         ██████
//                         ████████
static void attend_own(const float *of_queries, const float *of_keys, int64_t R, int64_t count, const float *values,
                       int64_t width, const FeatureScratch &own) {
  for (int64_t from = 0; from < count; from += PAIR_ROWS) {
    const int64_t rows = count - from < PAIR_ROWS ? count - from : PAIR_ROWS, lanes = round_up(from + rows, W);
    float *pairs = own.pairs + from * TILE;
    gemm_deep(rows, lanes, R, of_queries + from, 1, TILE, of_keys, TILE, pairs, TILE, false);
    for (int64_t i = 0; i < rows; i++) {
      vf total = {};
      for (int64_t j = 0; j < lanes; j += W) {
        const vf weights = lanes_before(from + i + 1 - j, load(pairs + i * TILE + j), 0);
        store(pairs + i * TILE + j, weights);
        total += weights;
      }
      own.total[from + i] += sum(total);
    }
    gemm(rows, width, from + rows, pairs, TILE, 1, values, width, own.out + from * width, width, true);
  }
}

// Queries [at, at + count): as `read` of a QueryScan.
static void attend_queries(const FeatureForward &a, const FeatureState &state, int64_t b, int64_t h, int64_t at,
                           int64_t count, const float *exponents, const float *of_keys, const float *values,
                           const FeatureScratch &own) {
  const FeatureInputs &in = a.inputs;
  query_features(state, exponents, count, own.other_features, own.high, own.total);
  gemm_deep(count, state.width, in.features, own.other_features, 1, TILE, state.sums, state.width, own.out, state.width,
            false);
  if (of_keys) attend_own(own.other_features, of_keys, in.features, count, values, state.width, own);
  for (int64_t i = 0; i < count; i++) {
    const float total = own.total[i], norm = total == 0 ? 0 : 1 / total;
    const int64_t place = (b * in.H + h) * in.N + at + i;
    const float log_total = __builtin_logf(total * GROWN);
    a.lse[place] = total == 0 ? -__builtin_inff() : own.high[i] + log_total;
    a.residual[place] = residual_of(a.lse[place], own.high[i], log_total);
    float *row = own.out + i * state.width;
    for (int64_t e = 0; e < state.width; e += W) store(row + e, load(row + e) * norm);
    store_row(row, in.E, row_of<float>(a.out, b, h, at + i));
  }
}

static int64_t feature_forward(const FeatureForward &a, void *workspace) {
  const FeatureInputs &in = a.inputs;
  const Visible visible{in.block, in.lag};
  Arena arena{(char *)workspace};
  const RangeStates states(arena, in, in.M, visible, true, 1 / GROWN);
  const PerThread<FeatureScratch> scratch(arena, in.threads, in, false, 1 / GROWN);
  if (!arena.base) return arena.used;

  const FeatureSide keys = keys_of(in), queries = queries_of(in);
  const Stage sums = {states.tasks(), [&](int64_t task, int t) {
    if (visible.all()) return states.sum_all(in, keys, nullptr, task, scratch.of[t]);
    states.scan(in, keys, keys, nullptr, task, scratch.of[t]);
  }};
  const Stage combined = {states.combined(), [&](int64_t group, int) { states.combine(group); }};
  const Stage reads = {query_tasks(in, states), [&](int64_t task, int t) {
    query_task(in, queries, keys, states, task, scratch.of[t], nullptr,
               [&](const auto &...of) { attend_queries(a, of...); });
  }};
  parallel_stages(in.threads, sums, combined, reads);
  return arena.used;
}
