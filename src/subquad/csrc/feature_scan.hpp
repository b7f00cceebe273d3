// Queries read the state of the keys that they see, tile by tile in the order of the sequence; a tile's own keys in pairs,
// with maxima that are those of the whole tile. A tile whose keys raise some c_r so far that its first queries' weights
// might vanish is taken in halves, down to single tokens. So is a tile with keys or values that are not finite, since 0·NaN
// is NaN: what is not finite in a key reaches its own and later queries, and no earlier one.

constexpr float MOST_RISE = 40;       // e⁻⁴⁰ of weights that vanish at e⁻⁸⁷
constexpr int64_t QUERY_PIECE = 256;  // tokens per task, where their order does not matter

static FeatureSide keys_of(const FeatureInputs &in) {
  return {.rows = in.key,
          .tokens = in.M,
          .width = in.key_width,
          .projection = in.of_key,
          .projection_head = in.of_key_head,
          .bias = nullptr,
          .bias_head = 0,
          .shift = in.key_bias,
          .shift_batch = in.key_bias_batch,
          .shift_head = in.key_bias_head,
          .payload = in.value,
          .weight = nullptr,
          .lse = nullptr,
          .residual = nullptr,
          .together = 1};
}

static FeatureSide queries_of(const FeatureInputs &in) {
  return {.rows = in.query,
          .tokens = in.N,
          .width = in.query_width,
          .projection = in.of_query,
          .projection_head = in.of_query_head,
          .bias = in.feature_bias,
          .bias_head = in.feature_bias_head,
          .shift = nullptr,
          .shift_batch = in.H * in.N,
          .shift_head = in.N,
          .payload = {},
          .weight = nullptr,
          .lse = nullptr,
          .residual = nullptr,
          .together = in.H / in.G};
}

// For each feature the maximum over the keys that the first query sees, and over those of `count` tokens from it, which
// the last query sees. Returns whether the second is much above the first, or not all of their exponents are numbers below
// infinity. The first query's maximum is the smallest, so no other query need be looked at.
static bool rises(const FeatureState &state, const float *exponents, int64_t count, float *raised) {
  for (int64_t r = 0; r < state.features; r++) raised[r] = state.largest[r];
  bool far = !raise_largest(exponents, state.features, count, raised);
  for (int64_t r = 0; r < state.features; r++) {
    const float first = exponents[r * TILE], seen = first > state.largest[r] ? first : state.largest[r];
    far |= raised[r] - seen > MOST_RISE;
  }
  return far;
}

// The queries of all heads that share a state of keys. `read(state, b, h, at, count, exponents, of_keys, values)` takes
// queries [at, at + count); under `causal` their own keys' features and values too, which the state does not hold yet.
template <class Read>
struct QueryScan {
  const FeatureInputs &in;
  const FeatureSide &queries, &keys;
  const RangeStates &states;
  const Read &read;
  const FeatureScratch &own;
  const SeenMaxima *seen;  // to be written, or null
  int64_t b, g;

  int64_t group() const { return in.H / in.G; }
  int64_t group_number() const { return b * in.G + g; }
  float *exponents_of(int64_t i) const { return own.of_heads[i]; }

  // Queries that see the same keys.
  void together(const FeatureState &state, int64_t h, int64_t from, int64_t to) const {
    for (int64_t at = from; at < to; at += TILE) {
      const int64_t count = to - at < TILE ? to - at : TILE;
      tile_exponents(queries, in.features, b, h, at, count, own.exponents, own);
      read(state, b, h, at, count, own.exponents, (const float *)nullptr, (const float *)nullptr, own);
    }
  }

  // Tokens [first, first + count) of the tile at `at`: their queries, then their keys into the state. Halves go in order,
  // so the second half's queries find the first half's keys in a state; into that which goes on, a tile always comes whole,
  // as in RangeStates::scan.
  void part(const FeatureState &state, int64_t at, int64_t first, int64_t count, bool whole) const {
    const float *values = own.payload + first * state.width;
    const bool far = rises(state, own.exponents + first, count, own.raised);
    if (count > 1 && (far || !all_finite(values, count * state.width))) {
      const FeatureState &halves = whole ? own.spare : state;
      if (whole) halves.copy(state);
      part(halves, at, first, count / 2, false);
      part(halves, at, first + count / 2, count - count / 2, false);
      if (whole) add_keys(state, count);
      return;
    }
    for (int64_t i = 0; seen && i < count; i++) seen->parts[group_number()][at + first + i] = (int32_t)(first + count);
    state.raise(own.raised);
    exponentiate(state, own.exponents + first, count, own.features);
    for (int64_t i = 0; i < group(); i++)
      read(state, b, g * group() + i, at + first, count, exponents_of(i) + first, own.features, values, own);
    add_tile(state, own.features, count, values, own.weight + first);
  }

  void add_keys(const FeatureState &state, int64_t count) const {
    for (int64_t r = 0; r < in.features; r++) own.raised[r] = state.largest[r];
    raise_largest(own.exponents, in.features, count, own.raised);
    state.raise(own.raised);
    exponentiate(state, own.exponents, count, own.features);
    add_tile(state, own.features, count, own.payload, own.weight);
  }

  void causally(const FeatureState &state, int64_t from, int64_t to) const {
    for (int64_t at = from; at < to; at += TILE) {
      const int64_t count = to - at < TILE ? to - at : TILE;
      if (seen) seen->write(group_number(), at, state.largest);
      for (int64_t i = 0; i < group(); i++)
        tile_exponents(queries, in.features, b, g * group() + i, at, count, exponents_of(i), own);
      tile_exponents(keys, in.features, b, g, at, count, own.exponents, own);
      pack_counted(keys.payload, b, g, at, count, in.E, own.shift, own.payload);
      part(state, at, 0, count, true);
    }
  }

  void lagged(const FeatureState &state, int64_t from, int64_t to) const {
    for (int64_t at = from; at < to; at += in.block) {
      const int64_t end = at + in.block < to ? at + in.block : to;
      states.add_block(state, keys, in.E, group_number(), in.G, at, nullptr, 0, own);
      if (seen) seen->write(group_number(), at, state.largest);
      for (int64_t h = g * group(); h < (g + 1) * group(); h++) together(state, h, at, end);
    }
  }
};

static int64_t pieces_of(int64_t tokens) { return (tokens + QUERY_PIECE - 1) / QUERY_PIECE; }

static int64_t query_tasks(const FeatureInputs &in, const RangeStates &states) {
  return states.visible.all() ? in.B * in.H * pieces_of(in.N) : states.groups * states.ranges.count;
}

// A piece of one head's queries, where they see all keys; else a range of those of all heads that share a state.
template <class Read>
static void query_task(const FeatureInputs &in, const FeatureSide &queries, const FeatureSide &keys,
                       const RangeStates &states, int64_t task, const FeatureScratch &own, const SeenMaxima *seen,
                       const Read &read) {
  const int64_t group = in.H / in.G;
  if (states.visible.all()) {
    const int64_t bh = task / pieces_of(in.N), from = task % pieces_of(in.N) * QUERY_PIECE, b = bh / in.H, h = bh % in.H;
    const int64_t to = from + QUERY_PIECE < in.N ? from + QUERY_PIECE : in.N;
    return QueryScan<Read>{in, queries, keys, states, read, own, seen, b, h / group}.together(states.at(bh / group, 0),
                                                                                              h, from, to);
  }
  const int64_t bg = task / states.ranges.count, from = task % states.ranges.count * states.ranges.size;
  const int64_t to = from + states.ranges.size < in.N ? from + states.ranges.size : in.N;
  const QueryScan<Read> scan{in, queries, keys, states, read, own, seen, bg / in.G, bg % in.G};
  if (in.lag > 0)
    scan.lagged(states.of[task], from, to);
  else
    scan.causally(states.of[task], from, to);
}
