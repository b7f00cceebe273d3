// The gradients of attention by features, from its output and log-sum-exp. With p_ir = e^{x_ir − lse_i}, f_jr = e^{y_jr}
// and −Δ_i = dlse_i − dO_i·O_i,
//
//     dx_ir = p_ir Σ_j f_jr (dO_i·v_j − Δ_i)     dy_jr = f_jr Σ_i p_ir (dO_i·v_j − Δ_i)     dv_j = Σ_ir f_jr p_ir dO_i
//
// over the pairs that see each other. The sums over keys are the state S, z of the forward pass. Those over queries are
// a state too, of p for features, dO for values and −Δ for ones, which is built from the end of the sequence:
//
//     QueryScan     → → →    state of the keys so far       → dx of a tile's queries   (query_slopes)
//     KeyScan       ← ← ←    state of the queries behind    → dy, dv of a tile's keys  (slopes)
//
// Pairs inside a tile are computed one by one. Both scans are tasks of the same stage.

struct FeatureGradients {
  Pieces<float> shift, weight;  // a head: (N) −lse and −Δ; −∞ and 0 for a query that takes no part

  FeatureGradients(Arena &arena, const FeatureInputs &in) {
    shift = arena.take_each<float>(in.B * in.H, in.N, TILE);  // parts of a tile are read in whole vectors
    weight = arena.take_each<float>(in.B * in.H, in.N, TILE);
    for (int64_t i = 0, last = in.B * in.H - 1; arena.base && i < TILE; i++)
      shift[last][in.N + i] = weight[last][in.N + i] = 0;
  }

  // A query whose output and log-sum-exp nobody reads is as one that sees no key: padding has no part in the maxima.
  void fill(const FeatureBackward &a, int64_t bh) const {
    const FeatureInputs &in = a.inputs;
    float *const shifts = shift[bh], *const weights = weight[bh];
    for (int64_t i = 0; i < in.N; i++) {
      const float lse = a.lse[bh * in.N + i];
      const bool sees = lse != -__builtin_inff();
      weights[i] = sees && a.grad_lse ? a.grad_lse[bh * in.N + i] : 0;
      bool read = weights[i] != 0;
      if (sees && a.grad_out.data) {
        const float *grad = row_of<float>(a.grad_out, bh / in.H, bh % in.H, i);
        weights[i] -= dot(grad, row_of<float>(a.out, bh / in.H, bh % in.H, i), in.E);
        for (int64_t e = 0; e < in.E && !read; e++) read = grad[e] != 0;
        read |= weights[i] != 0;  // 0·NaN
      }
      shifts[i] = read ? -lse : -__builtin_inff();
    }
  }
};

// A tile's gradients of exponents (R,TILE) to those of its rows.
static void rows_from_slopes(const FeatureSide &side, const Rows &grad, int64_t R, int64_t b, int64_t h, int64_t at,
                             int64_t count, const FeatureScratch &own) {
  const int64_t width = round_up(side.width, W);
  if (side.projection)
    gemm_deep(count, width, R, own.slopes, 1, TILE, side.projection + h * side.projection_head,
              round_up(side.width, PITCH), own.out, width, false);
  else
    pack_transposed(own.slopes, width, count, TILE, own.out, width);
  for (int64_t i = 0; i < count; i++) store_row(own.out + i * width, side.width, row_of<float>(grad, b, h, at + i));
}

// A head's dO for queries [at, at + count), also transposed.
static void pack_grads(const FeatureSide &queries, int64_t E, int64_t b, int64_t h, int64_t at, int64_t count,
                       const FeatureScratch &own) {
  pack_counted(queries.payload, b, h, at, count, E, queries.of_head(queries.shift, b, h) + at, own.others);
}

// Queries [at, at + count): as `read` of a QueryScan.
static void query_slopes(const FeatureBackward &a, const FeatureSide &queries, const FeatureState &state, int64_t b,
                         int64_t h, int64_t at, int64_t count, const float *exponents, const float *of_keys,
                         const float *values, const FeatureScratch &own) {
  const int64_t R = state.features, E = state.width, lanes = round_up(count, W);
  const float *weight = queries.of_head(queries.weight, b, h) + at;
  pack_grads(queries, a.inputs.E, b, h, at, count, own);
  pack_transposed(own.others, lanes, a.inputs.E, E, own.other_columns, TILE);
  gemm(R, lanes, a.inputs.E, state.sums, E, 1, own.other_columns, TILE, own.slopes, TILE, false);
  if (of_keys) {  // (keys,queries) of the tile
    gemm(count, lanes, a.inputs.E, values, E, 1, own.other_columns, TILE, own.pair_slopes, TILE, false);
    for (int64_t j = 0; j < count; j++)
      for (int64_t i = 0; i < lanes; i += W) {
        float *of = own.pair_slopes + j * TILE + i;
        store(of, lanes_from(j - i, load(of) + load(weight + i)));
      }
    gemm(R, lanes, count, of_keys, TILE, 1, own.pair_slopes, TILE, own.slopes, TILE, true);
  }
  for (int64_t r = 0; r < R; r++)
    for (int64_t i = 0; i < lanes; i += W) {
      float *slopes = own.slopes + r * TILE + i;
      const vf p = exp_nonpositive(load(exponents + r * TILE + i) + state.largest[r]);
      store(slopes, p * (load(slopes) + load(weight + i) * state.totals[r]));
    }
  rows_from_slopes(queries, a.grad_query, R, b, h, at, count, own);
}

// Keys of one head, with a state of the queries that see them.
struct KeyScan {
  const FeatureBackward &a;
  const FeatureSide &queries, &keys;
  const Visible &visible;
  const FeatureScratch &own;
  int64_t b, g;

  int64_t group() const { return a.inputs.H / a.inputs.G; }
  float *exponents_of(int64_t i) const { return own.of_heads[i]; }

  void load_keys(int64_t at, int64_t count) const {
    const FeatureInputs &in = a.inputs;
    tile_exponents(keys, in.features, b, g, at, count, own.exponents, own);
    pack_counted(keys.payload, b, g, at, count, in.E, own.shift, own.payload);
    pack_transposed(own.payload, round_up(count, W), in.E, round_up(in.E, W), own.payload_columns, TILE);
  }

  // The queries of the tile itself, of head h; key j is seen by those from j on. Then they go into the state.
  void own_queries(const FeatureState &state, int64_t h, int64_t at, int64_t count, const float *exponents,
                   const float *value_columns) const {
    const int64_t R = state.features, E = state.width, lanes = round_up(count, W);
    const float *weight = queries.of_head(queries.weight, b, h) + at;
    pack_grads(queries, a.inputs.E, b, h, at, count, own);
    exponentiate(exponents, R, count, state.largest, own.other_features);
    gemm_deep(count, lanes, R, own.other_features, 1, TILE, own.features, TILE, own.pairs, TILE, false);
    gemm(count, lanes, a.inputs.E, own.others, E, 1, value_columns, TILE, own.pair_slopes, TILE, false);
    for (int64_t i = 0; i < count; i++)
      for (int64_t j = 0; j < lanes; j += W) {
        float *pairs = own.pairs + i * TILE + j, *slopes = own.pair_slopes + i * TILE + j;
        store(pairs, lanes_before(i + 1 - j, load(pairs), 0));
        store(slopes, lanes_before(i + 1 - j, load(slopes) + weight[i], 0));
      }
    gemm(count, E, count, own.pairs, 1, TILE, own.others, E, own.value_grads, E, true);
    gemm(R, lanes, count, own.other_features, TILE, 1, own.pair_slopes, TILE, own.slopes, TILE, true);
    add_tile(state, own.other_features, count, own.others, weight);
  }

  // Keys [first, first + count) of the tile at `at`; with_own: the queries of those tokens see them too.
  void slopes(const FeatureState &state, int64_t at, int64_t first, int64_t count, bool with_own) const {
    const FeatureInputs &in = a.inputs;
    const int64_t R = in.features, E = state.width, lanes = round_up(count, W);
    const float *exponents = own.exponents + first, *value_columns = own.payload_columns + first;
    for (int64_t r = 0; r < R; r++)
      for (int64_t j = 0; j < lanes; j += W)
        store(own.features + r * TILE + j, exp_nonpositive(load(exponents + r * TILE + j) + state.largest[r]));
    gemm_deep(count, E, R, own.features, 1, TILE, state.sums, E, own.value_grads, E, false);
    gemm(R, lanes, in.E, state.sums, E, 1, value_columns, TILE, own.slopes, TILE, false);
    for (int64_t r = 0; r < R; r++) own.raised[r] = state.totals[r];  // without the tile's own
    for (int64_t i = 0; with_own && i < group(); i++)
      own_queries(state, g * group() + i, at + first, count, exponents_of(i) + first, value_columns);
    zero(own.total, lanes);
    for (int64_t r = 0; r < R; r++)
      for (int64_t j = 0; j < lanes; j += W) {
        float *of = own.slopes + r * TILE + j;
        const vf slope = load(own.features + r * TILE + j) * (load(of) + own.raised[r]);
        store(of, slope);
        store(own.total + j, load(own.total + j) + slope);
      }
    rows_from_slopes(keys, a.grad_key, R, b, g, at + first, count, own);
    for (int64_t j = 0; j < count; j++) {
      if (own.shift[first + j] == -__builtin_inff()) {  // hidden: no gradient, also where the state is NaN
        zero(row_of<float>(a.grad_key, b, g, at + first + j), keys.width);
        zero(own.value_grads + j * E, E);
        own.total[j] = 0;
      }
      store_row(own.value_grads + j * E, in.E, row_of<float>(a.grad_value, b, g, at + first + j));
      if (a.grad_key_bias) a.grad_key_bias[(b * in.G + g) * in.M + at + first + j] = own.total[j];
    }
  }

  // Keys that the same queries see.
  void together(const FeatureState &state, int64_t from, int64_t to) const {
    for (int64_t at = from; at < to; at += TILE) {
      const int64_t count = to - at < TILE ? to - at : TILE;
      load_keys(at, count);
      slopes(state, at, 0, count, false);
    }
  }

  // Keys are weighed with the maxima d_r over all queries of the tile, also those that do not see them. Where such an
  // e^{y + d} might overflow, or a query's exponents or Δ are not finite, the tile is taken in halves, the last first.
  void part(const FeatureState &state, int64_t at, int64_t first, int64_t count) const {
    const int64_t R = a.inputs.features;
    for (int64_t r = 0; r < R; r++) own.raised[r] = state.largest[r];
    bool finite = true;
    for (int64_t i = 0; i < group(); i++) {
      finite &= raise_largest(exponents_of(i) + first, R, count, own.raised);
      finite &= all_finite(queries.of_head(queries.weight, b, g * group() + i) + at + first, count);
    }
    vf high = splat(-__builtin_inff());
    for (int64_t r = 0; r < R; r++)
      for (int64_t j = 0; j < count; j += W) {
        const vf sums = load(own.exponents + first + r * TILE + j) + own.raised[r];
        high = maximum(lanes_before(count - j, sums, -__builtin_inff()), high);
      }
    if (count > 1 && (highest(high) > MOST_RISE || !finite)) {
      part(state, at, first + count / 2, count - count / 2);
      return part(state, at, first, count / 2);
    }
    state.raise(own.raised);
    slopes(state, at, first, count, true);
  }

  void causally(const FeatureState &state, int64_t from, int64_t to) const {
    for (int64_t at = from + (to - from - 1) / TILE * TILE; at >= from; at -= TILE) {
      const int64_t count = to - at < TILE ? to - at : TILE;
      for (int64_t i = 0; i < group(); i++)
        tile_exponents(queries, a.inputs.features, b, g * group() + i, at, count, exponents_of(i), own);
      load_keys(at, count);
      part(state, at, 0, count);
    }
  }

  void lagged(const FeatureState &state, int64_t from, int64_t to) const {
    for (int64_t at = from + (to - from - 1) / visible.block * visible.block; at >= from; at -= visible.block) {
      const int64_t ahead = at + visible.shift(), end = at + visible.block < to ? at + visible.block : to;
      add_tokens(state, queries, a.inputs.E, b, g, ahead, ahead + visible.block, own);
      together(state, at, end);
    }
  }
};

static int64_t key_tasks(const FeatureInputs &in, const Visible &visible, const RangeStates &states) {
  return visible.all() ? in.B * in.G * pieces_of(in.M) : states.tasks(in);
}

static void key_task(const FeatureBackward &a, const FeatureSide &queries, const FeatureSide &keys,
                     const Visible &visible, const RangeStates &states, int64_t task, const FeatureScratch &own) {
  const FeatureInputs &in = a.inputs;
  const int64_t size = visible.all() ? QUERY_PIECE : states.ranges.size;
  const int64_t count = visible.all() ? pieces_of(in.M) : states.ranges.count;
  const int64_t bg = task / count, from = task % count * size, to = from + size < in.M ? from + size : in.M;
  const KeyScan scan{a, queries, keys, visible, own, bg / in.G, bg % in.G};
  if (visible.all())
    scan.together(states.at(bg, 0), from, to);
  else if (visible.lag > 0)
    scan.lagged(states.of[task], from, to);
  else
    scan.causally(states.of[task], from, to);
}

static int64_t feature_backward(const FeatureBackward &a, void *workspace) {
  const FeatureInputs &in = a.inputs;
  const Visible visible{in.block, in.lag};
  Arena arena{(char *)workspace};
  const FeatureGradients gradients(arena, in);
  const RangeStates of_keys(arena, in, in.M, visible, true), of_queries(arena, in, in.N, visible, false);
  const PerThread<FeatureScratch> scratch(arena, in.threads, in, true);
  if (!arena.base) return arena.used;

  FeatureSide keys = keys_of(in), queries = queries_of(in);
  queries.payload = a.grad_out;
  queries.shift = gradients.shift.first;
  queries.weight = gradients.weight.first;
  queries.shift_head = gradients.shift.pitch;
  queries.shift_batch = in.H * gradients.shift.pitch;
  const Stage deltas = {in.B * in.H, [&](int64_t bh, int) { gradients.fill(a, bh); }};
  const int64_t sums_of_keys = of_keys.tasks(in), slopes_of_keys = key_tasks(in, visible, of_queries);
  const Stage sums = {sums_of_keys + of_queries.tasks(in), [&](int64_t task, int t) {
    if (task < sums_of_keys) return of_keys.sum(in, keys, task, scratch.of[t]);
    of_queries.sum(in, queries, task - sums_of_keys, scratch.of[t]);
  }};
  const Stage combined = {in.B * in.G, [&](int64_t group, int) {
    of_keys.combine(group);
    of_queries.combine(group);
  }};
  const Stage slopes = {slopes_of_keys + query_tasks(in, visible, of_keys), [&](int64_t task, int t) {
    if (task < slopes_of_keys) return key_task(a, queries, keys, visible, of_queries, task, scratch.of[t]);
    query_task(in, queries, keys, visible, of_keys, task - slopes_of_keys, scratch.of[t],
               [&](const auto &...of) { query_slopes(a, queries, of...); });
  }};
  parallel_stages(in.threads, deltas, sums, combined, slopes);
  return arena.used;
}
