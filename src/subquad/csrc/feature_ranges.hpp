// Attention by features in ranges of the sequence, so that a few heads keep all threads busy. How a sequence is cut depends
// on the number of threads, and no result does:
//
// - If every query sees every key, blocks of a size that depends on the length alone are summed, and their states are
//   added in their order, by one thread or by several.
// - Under an order, the state at the beginning of each range is that of the one scan over all tokens before it (of
//   queries: behind it). Threads share that scan by features, which have nothing to do with each other.
//
//     tokens                range 0     range 1     range 2
//     features 0 … 31       state 0  →  state 1  →  state 2        by one thread (of queries: 0 ← 1 ← 2)
//     features 32 … 63      state 0  →  state 1  →  state 2        by another
//
// After that ranges can be worked on side by side.

constexpr int64_t RANGE = 256;      // tokens of a range at least
constexpr int64_t MOST_BLOCKS = 8;  // whose states are added

// Which keys a query sees: all; under `causal` those up to it; or those of blocks that are at least `lag` before its own:
// with a lag of 2, queries of block 4 see the keys of blocks 0, 1 and 2.
struct Visible {
  int64_t block, lag;  // block 0: all; lag 0: causal
  bool all() const { return block == 0; }
  int64_t shift() const { return lag * block; }
  int64_t unit() const { return lag > 0 ? block : TILE; }
};

// A sequence in ranges of whole units: few, where there are heads enough to keep the threads busy.
struct Ranges {
  int64_t count, size;
  Ranges(int64_t states, int64_t tokens, int64_t unit, int64_t threads) {
    const int64_t wanted = heads_side_by_side(states, threads) ? 1 : (4 * threads + states - 1) / states;
    cut(tokens, wanted, unit);
  }
  explicit Ranges(int64_t tokens) { cut(tokens, MOST_BLOCKS, TILE); }

  void cut(int64_t tokens, int64_t wanted, int64_t unit) {
    const int64_t share = (tokens + wanted - 1) / wanted;
    size = round_up(share > RANGE ? share : RANGE, unit);
    count = tokens > size ? (tokens + size - 1) / size : 1;
  }
};

// Rows of a state, features or others, that threads share.
struct Slices {
  int64_t count, size;
  Slices(int64_t rows, int64_t threads) : size(round_up(rows > 0 ? (rows + threads - 1) / threads : 1, W)) {
    count = (rows + size - 1) / size;
  }
};

// What each query sees of the keys' maxima, as the backward pass finds it: under `causal` the maxima before each tile and
// at the end, and for each token the end of the part of its tile that was taken together; else those of each block.
struct SeenMaxima {
  Pieces<float> of;       // (units + 1,R)
  Pieces<int32_t> parts;  // (M)
  int64_t unit, features;

  SeenMaxima(Arena &arena, const FeatureInputs &in, const Visible &visible)
      : unit(visible.unit()), features(in.features) {
    const int64_t units = visible.all() ? 0 : (in.M + unit - 1) / unit + 1;
    of = arena.take_each<float>(in.B * in.G, units * features);
    parts = arena.take_each<int32_t>(in.B * in.G, visible.all() || visible.lag > 0 ? 0 : in.M);
  }

  float *at(int64_t group, int64_t token) const { return of[group] + token / unit * features; }

  void write(int64_t group, int64_t token, const float *maxima) const {
    float *to = of[group] + (token + unit - 1) / unit * features;
    for (int64_t r = 0; r < features; r++) to[r] = maxima[r];
  }

  // The beginning of the part of the tile at `at` that ends before token `end` of it.
  int64_t beginning(int64_t group, int64_t at, int64_t end) const {
    const int32_t *tile = parts[group] + at;
    int64_t first = end - 1;
    while (first > 0 && tile[first - 1] == end) first--;
    return first;
  }

  // The maxima that this part's queries see, of the features from `first` on; `exponents` are the tile's keys'.
  void of_part(int64_t group, int64_t at, int64_t end, int64_t first, int64_t count, const float *exponents,
               float *to) const {
    const float *before = this->at(group, at) + first;
    for (int64_t r = 0; r < count; r++) to[r] = before[r];
    raise_largest(exponents, count, end, to);
  }
};

// own.relative ← the exponents of queries [at, at + count) of all heads that share a state, from own.of_heads at `first`
// on; own.raised ← their maxima with the state's. Returns whether all are numbers below infinity.
static bool relative_queries(const FeatureState &state, const FeatureSide &queries, int64_t b, int64_t g, int64_t at,
                             int64_t first, int64_t count, const float *seen, const FeatureScratch &own) {
  bool finite = true;
  for (int64_t r = 0; r < state.features; r++) own.raised[r] = state.largest[r];
  for (int64_t i = 0; i < queries.together; i++) {
    const int64_t h = g * queries.together + i;
    make_relative(own.of_heads[i] + first, state.features, count, seen, queries.of_head(queries.lse, b, h) + at,
                  queries.of_head(queries.residual, b, h) + at, own.relative[i]);
    finite &= raise_largest(own.relative[i], state.features, count, own.raised);
  }
  return finite;
}

// A head's dO for queries [at, at + count).
static void pack_grads(const FeatureSide &queries, int64_t E, int64_t b, int64_t h, int64_t at, int64_t count,
                       const FeatureScratch &own) {
  pack_counted(queries.payload, b, h, at, count, E, queries.of_head(queries.shift, b, h) + at, own.others);
}

// Queries [at, at + count) of own.of_heads, from `first` on, into the state.
static void add_queries(const FeatureState &state, const FeatureSide &queries, int64_t E, int64_t b, int64_t g,
                        int64_t at, int64_t first, int64_t count, const float *seen, const FeatureScratch &own) {
  state.rebase(seen);
  relative_queries(state, queries, b, g, at, first, count, seen, own);
  state.raise(own.raised);
  for (int64_t i = 0; i < queries.together; i++) {
    const int64_t h = g * queries.together + i;
    pack_grads(queries, E, b, h, at, count, own);
    exponentiate(state, own.relative[i], count, own.other_features);
    add_tile(state, own.other_features, count, own.others, queries.of_head(queries.weight, b, h) + at);
  }
}

// States of one side for all (batch item, key head), one for each range; where every query sees every key, the first
// one's is that of all tokens in the end.
struct RangeStates {
  FeatureState *of;
  Visible visible;
  Ranges ranges;
  Slices slices;
  bool of_keys, side_by_side;
  int64_t groups, kept;  // states of a group

  RangeStates(Arena &arena, const FeatureInputs &in, int64_t tokens, const Visible &visible, bool of_keys, float unit)
      : visible(visible),
        ranges(visible.all() ? Ranges(tokens) : Ranges(in.B * in.G, tokens, visible.unit(), in.threads)),
        slices(in.features, !visible.all() && ranges.count > 1 ? in.threads : 1),
        of_keys(of_keys),
        side_by_side(heads_side_by_side(in.B * in.G, in.threads)),
        groups(in.B * in.G),
        kept(visible.all() && side_by_side ? 1 : ranges.count) {
    of = arena.take<FeatureState>(groups * kept);
    for (int64_t i = 0; i < groups * kept; i++) {
      const FeatureState state(arena, in.features, in.E, unit);
      if (arena.base) of[i] = state;
    }
  }

  int64_t tasks() const { return groups * (visible.all() ? kept : slices.count); }
  const FeatureState &at(int64_t group, int64_t range) const { return of[group * kept + range]; }

  // For queries that all see every key: a block's state, or those of all blocks of a group one after the other.
  void sum_all(const FeatureInputs &in, const FeatureSide &side, const RangeStates *keys, int64_t task,
               const FeatureScratch &own) const {
    const int64_t group = task / kept, first = task % kept, last = kept == 1 ? ranges.count - 1 : first;
    for (int64_t block = first; block <= last; block++) {
      const FeatureState &state = block == first ? of[task] : own.spare;
      state.clear();
      add_tokens(state, side, in.E, group / in.G, group % in.G, block * ranges.size, (block + 1) * ranges.size,
                 keys ? keys->at(group, 0).largest : nullptr, own);
      if (block > first) of[task].add(state);
    }
  }

  void combine(int64_t group) const {
    for (int64_t i = 1; i < kept; i++) at(group, 0).add(at(group, i));
  }
  int64_t combined() const { return visible.all() && kept > 1 ? groups : 0; }

  // Under an order, some features of the states at the beginning of every range; of queries, at its end.
  void scan(const FeatureInputs &in, const FeatureSide &side, const FeatureSide &keys, const SeenMaxima *seen,
            int64_t task, const FeatureScratch &own) const {
    const int64_t group = task / slices.count, first = task % slices.count * slices.size, b = group / in.G;
    const int64_t left = in.features - first, R = left < slices.size ? left : slices.size, last = ranges.count - 1;
    const FeatureSide part = side.of_features(first, R), part_of_keys = keys.of_features(first, R);
    auto state_at = [&](int64_t range) { return at(group, range).of_features(first, R); };
    state_at(of_keys ? 0 : last).clear();
    for (int64_t i = 0; i < last; i++) {
      const int64_t range = of_keys ? i : last - i, from = range * ranges.size, next = of_keys ? range + 1 : range - 1;
      const int64_t to = from + ranges.size < side.tokens ? from + ranges.size : side.tokens;
      const int64_t unit = visible.unit(), units = (to - from + unit - 1) / unit;
      const FeatureState state = state_at(next);
      state.copy(state_at(range));
      for (int64_t u = 0; u < units; u++) {
        const int64_t at = from + (of_keys ? u : units - 1 - u) * unit, end = at + unit < to ? at + unit : to;
        if (visible.lag == 0 && !of_keys)
          scan_queries(in, part, part_of_keys, *seen, state, group, first, at, end - at, own);
        else if (visible.lag == 0)
          add_tokens(state, part, in.E, b, group % in.G, at, end, nullptr, own);
        else
          add_block(state, part, in.E, group, in.G, at, seen, first, own);
      }
    }
  }

  // What the block at `at` meets first, which is `lag` blocks before it or, of queries, behind it.
  void add_block(const FeatureState &state, const FeatureSide &side, int64_t E, int64_t group, int64_t G, int64_t at,
                 const SeenMaxima *seen, int64_t first, const FeatureScratch &own) const {
    const int64_t from = of_keys ? at - visible.shift() : at + visible.shift();
    if (from < 0 || from >= side.tokens) return;
    add_tokens(state, side, E, group / G, group % G, from, from + visible.block,
               of_keys ? nullptr : seen->at(group, from) + first, own);
  }

  // A tile's queries, part after part from the last on.
  static void scan_queries(const FeatureInputs &in, const FeatureSide &queries, const FeatureSide &keys,
                           const SeenMaxima &seen, const FeatureState &state, int64_t group, int64_t feature, int64_t at,
                           int64_t count, const FeatureScratch &own) {
    const int64_t R = state.features, b = group / in.G, g = group % in.G;
    for (int64_t i = 0; i < queries.together; i++)
      tile_exponents(queries, R, b, g * queries.together + i, at, count, own.of_heads[i], own);
    tile_exponents(keys, R, b, g, at, count, own.exponents, own);
    for (int64_t end = count, first; end > 0; end = first) {
      first = seen.beginning(group, at, end);
      seen.of_part(group, at, end, feature, R, own.exponents, own.seen);
      add_queries(state, queries, in.E, b, g, at + first, first, end - first, own.seen, own);
    }
  }
};
