// The gradients of attention by features, from its output and log-sum-exp. With p_ir = e^{(x_ir + c_r) − lse_i},
// f_jr = e^{y_jr − c_r} and −Δ_i = dlse_i − dO_i·O_i,
//
//     dx_ir = p_ir Σ_j f_jr (dO_i·v_j − Δ_i)     dy_jr = f_jr Σ_i p_ir (dO_i·v_j − Δ_i)     dv_j = Σ_ir f_jr p_ir dO_i
//
// over the pairs that see each other. The sums over keys are the state S, z of the forward pass. Those over queries are
// a state too, of p for features, dO for values and −Δ for ones, which is built from the end of the sequence:
//
//     QueryScan     → → →    state of the keys so far       → dx of a tile's queries   (query_slopes)
//     KeyScan       ← ← ←    state of the queries behind    → dy, dv of a tile's keys  (slopes)
//
// Pairs inside a tile are computed one by one. The first scan writes down the maxima c_r that each query sees for the second.

struct FeatureGradients {
  Pieces<float> shift, weight;  // a head: (N) 0 and −Δ; −∞ and 0 for a query that takes no part
  Pieces<float> lse, residual;  // (N); 0 for such a query

  FeatureGradients(Arena &arena, const FeatureInputs &in) {
    for (Pieces<float> *each : {&shift, &weight, &lse, &residual}) {
      *each = arena.take_each<float>(in.B * in.H, in.N, TILE);  // parts of a tile are read in whole vectors
      for (int64_t i = 0, last = in.B * in.H - 1; arena.base && i < TILE; i++) (*each)[last][in.N + i] = 0;
    }
  }

  // A query whose output and log-sum-exp nobody reads is as one that sees no key: padding has no part in the maxima.
  void fill(const FeatureBackward &a, int64_t bh) const {
    const FeatureInputs &in = a.inputs;
    float *const shifts = shift[bh], *const weights = weight[bh];
    for (int64_t i = 0; i < in.N; i++) {
      const float of_row = a.lse[bh * in.N + i];
      const bool sees = of_row != -__builtin_inff();
      weights[i] = sees && a.grad_lse ? a.grad_lse[bh * in.N + i] : 0;
      bool read = weights[i] != 0;
      if (sees && a.grad_out.data) {
        const float *grad = row_of<float>(a.grad_out, bh / in.H, bh % in.H, i);
        weights[i] -= dot(grad, row_of<float>(a.out, bh / in.H, bh % in.H, i), in.E);
        for (int64_t e = 0; e < in.E && !read; e++) read = grad[e] != 0;
        read |= weights[i] != 0;  // 0·NaN
      }
      shifts[i] = read ? 0 : -__builtin_inff();
      lse[bh][i] = read ? of_row : 0;
      residual[bh][i] = read ? a.residual[bh * in.N + i] : 0;
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

// Queries [at, at + count): as `read` of a QueryScan.
static void query_slopes(const FeatureBackward &a, const FeatureSide &queries, const FeatureState &state, int64_t b,
                         int64_t h, int64_t at, int64_t count, const float *exponents, const float *of_keys,
                         const float *values, const FeatureScratch &own) {
  const int64_t R = state.features, E = state.width, lanes = round_up(count, W);
  const float *weight = queries.of_head(queries.weight, b, h) + at;
  const float *lse = queries.of_head(queries.lse, b, h) + at, *residual = queries.of_head(queries.residual, b, h) + at;
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
      const vf seen = load(exponents + r * TILE + i) + state.largest[r];
      const vf p = exp_nonpositive((seen - load(lse + i)) - load(residual + i));
      store(slopes, p * (load(slopes) + load(weight + i) * state.totals[r]));
    }
  rows_from_slopes(queries, a.grad_query, R, b, h, at, count, own);
}

// Keys of one head, with a state of the queries that see them.
struct KeyScan {
  const FeatureBackward &a;
  const FeatureSide &queries, &keys;
  const RangeStates &states;  // of queries
  const SeenMaxima &seen;
  const FeatureScratch &own;
  int64_t b, g;

  int64_t group() const { return a.inputs.H / a.inputs.G; }

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
    exponentiate(state, exponents, count, own.other_features);
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
        store(own.features + r * TILE + j,
              exp_nonpositive((load(exponents + r * TILE + j) - state.base[r]) + state.largest[r]));
    gemm_deep(count, E, R, own.features, 1, TILE, state.sums, E, own.value_grads, E, false);
    gemm(R, lanes, in.E, state.sums, E, 1, value_columns, TILE, own.slopes, TILE, false);
    for (int64_t r = 0; r < R; r++) own.raised[r] = state.totals[r];  // without the tile's own
    for (int64_t i = 0; with_own && i < group(); i++)
      own_queries(state, g * group() + i, at + first, count, own.relative[i], value_columns);
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

  // Keys are weighed with the maxima d_r over all queries of the part, also those that do not see them. If such an
  // e^{y + d} might overflow, or a query's exponents or Δ are not finite, it is taken in halves, the last first; into the
  // state that goes on, its queries come together, as in RangeStates::scan.
  void part(const FeatureState &state, int64_t at, int64_t first, int64_t count, bool whole) const {
    const int64_t R = a.inputs.features;
    state.rebase(own.seen);
    bool finite = relative_queries(state, queries, b, g, at + first, first, count, own.seen, own);
    for (int64_t i = 0; i < group(); i++)
      finite &= all_finite(queries.of_head(queries.weight, b, g * group() + i) + at + first, count);
    vf high = splat(-__builtin_inff());
    for (int64_t r = 0; r < R; r++)
      for (int64_t j = 0; j < count; j += W) {
        const vf sums = (load(own.exponents + first + r * TILE + j) - state.base[r]) + own.raised[r];
        high = maximum(lanes_before(count - j, sums, -__builtin_inff()), high);
      }
    if (count > 1 && (highest(high) > MOST_RISE || !finite)) {
      const FeatureState &halves = whole ? own.spare : state;
      if (whole) halves.copy(state);
      part(halves, at, first + count / 2, count - count / 2, false);
      part(halves, at, first, count / 2, false);
      if (whole) add_queries(state, queries, a.inputs.E, b, g, at + first, first, count, own.seen, own);
      return;
    }
    state.raise(own.raised);
    slopes(state, at, first, count, true);
  }

  void causally(const FeatureState &state, int64_t from, int64_t to) const {
    const int64_t R = a.inputs.features, bg = b * a.inputs.G + g;
    for (int64_t at = from + (to - from - 1) / TILE * TILE; at >= from; at -= TILE) {
      const int64_t count = to - at < TILE ? to - at : TILE;
      for (int64_t i = 0; i < group(); i++)
        tile_exponents(queries, R, b, g * group() + i, at, count, own.of_heads[i], own);
      load_keys(at, count);
      for (int64_t end = count, first; end > 0; end = first) {
        first = seen.beginning(bg, at, end);
        seen.of_part(bg, at, end, 0, R, own.exponents, own.seen);
        part(state, at, first, end - first, true);
      }
    }
  }

  void lagged(const FeatureState &state, int64_t from, int64_t to) const {
    const FeatureInputs &in = a.inputs;
    for (int64_t at = from + (to - from - 1) / in.block * in.block; at >= from; at -= in.block) {
      const int64_t end = at + in.block < to ? at + in.block : to;
      states.add_block(state, queries, in.E, b * in.G + g, in.G, at, &seen, 0, own);
      together(state, at, end);
    }
  }
};

static int64_t key_tasks(const FeatureInputs &in, const RangeStates &states) {
  return states.visible.all() ? in.B * in.G * pieces_of(in.M) : states.groups * states.ranges.count;
}

static void key_task(const FeatureBackward &a, const FeatureSide &queries, const FeatureSide &keys,
                     const SeenMaxima &seen, const RangeStates &states, int64_t task, const FeatureScratch &own) {
  const FeatureInputs &in = a.inputs;
  const bool all = states.visible.all();
  const int64_t size = all ? QUERY_PIECE : states.ranges.size, count = all ? pieces_of(in.M) : states.ranges.count;
  const int64_t bg = task / count, from = task % count * size, to = from + size < in.M ? from + size : in.M;
  const KeyScan scan{a, queries, keys, states, seen, own, bg / in.G, bg % in.G};
  if (all)
    scan.together(states.at(bg, 0), from, to);
  else if (in.lag > 0)
    scan.lagged(states.of[task], from, to);
  else
    scan.causally(states.of[task], from, to);
}

static int64_t feature_backward(const FeatureBackward &a, void *workspace) {
  const FeatureInputs &in = a.inputs;
  const Visible visible{in.block, in.lag};
  Arena arena{(char *)workspace};
  const FeatureGradients gradients(arena, in);
  const RangeStates of_keys(arena, in, in.M, visible, true, 1), of_queries(arena, in, in.N, visible, false, 1);
  const SeenMaxima seen(arena, in, visible);
  const PerThread<FeatureScratch> scratch(arena, in.threads, in, true, 1.0f);
  if (!arena.base) return arena.used;

  const FeatureSide keys = keys_of(in);
  FeatureSide queries = queries_of(in);
  queries.payload = a.grad_out;
  queries.shift = gradients.shift.first;
  queries.weight = gradients.weight.first;
  queries.lse = gradients.lse.first;
  queries.residual = gradients.residual.first;
  queries.shift_head = gradients.shift.pitch;
  queries.shift_batch = in.H * gradients.shift.pitch;
  const Stage deltas = {in.B * in.H, [&](int64_t bh, int) { gradients.fill(a, bh); }};
  const Stage sums_of_keys = {of_keys.tasks(), [&](int64_t task, int t) {
    if (visible.all()) return of_keys.sum_all(in, keys, nullptr, task, scratch.of[t]);
    of_keys.scan(in, keys, keys, nullptr, task, scratch.of[t]);
  }};
  const Stage combined_keys = {of_keys.combined(), [&](int64_t group, int) { of_keys.combine(group); }};
  auto query_slope = [&](int64_t task, int t) {
    query_task(in, queries, keys, of_keys, task, scratch.of[t], visible.all() ? nullptr : &seen,
               [&](const auto &...of) { query_slopes(a, queries, of...); });
  };
  const int64_t of_key_tasks = key_tasks(in, of_queries), of_query_tasks = query_tasks(in, of_keys);
  const Stage slopes_of_queries = {visible.all() ? 0 : of_query_tasks, query_slope};
  // The queries' state needs what they see of the keys' maxima: under an order, what their scan wrote down.
  const Stage sums_of_queries = {of_queries.tasks(), [&](int64_t task, int t) {
    if (visible.all()) return of_queries.sum_all(in, queries, &of_keys, task, scratch.of[t]);
    of_queries.scan(in, queries, keys, &seen, task, scratch.of[t]);
  }};
  const Stage combined_queries = {of_queries.combined(), [&](int64_t group, int) { of_queries.combine(group); }};
  const Stage slopes = {of_key_tasks + (visible.all() ? of_query_tasks : 0), [&](int64_t task, int t) {
    if (task >= of_key_tasks) return query_slope(task - of_key_tasks, t);
    key_task(a, queries, keys, seen, of_queries, task, scratch.of[t]);
  }};
  parallel_stages(in.threads, deltas, sums_of_keys, combined_keys, slopes_of_queries, sums_of_queries,
                  combined_queries, slopes);
  return arena.used;
}
