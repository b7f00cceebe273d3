// Exact attention in bf16 by AMX. As in `exact_forward.hpp`, queries are lanes and keys are rows; the output is kept
// across, too, so that the weights are an operand as they are computed, and sums shrink lane by lane:
//
//                     queries, lanes →                                      queries, lanes →
//                   ┌────────────────┐                                    ┌────────────────┐
//     some keys     │ logits K·Qᵀ    │  → weights, in pairs of keys   E ↓ │ out += Vᵀ·P    │
//            ↓      │                │    above each other                │                │
//                   └────────────────┘                                    └────────────────┘
//
// As there, the sums of some keys start at 0 and are then added to those of all keys before.
//
// All keys and values are packed once, in tiles: keys as they are, values across in pairs of neighbouring keys.

#if defined(SUBQUAD_AMX)

constexpr int64_t AMX_QUERIES = 32, AMX_KEYS = 64;  // of one softmax: their logits and sums stay in the first-level cache
constexpr int64_t AMX_SPAN = 8 * AMX_KEYS;                // keys of one sum
constexpr int64_t AMX_STEP = 2 * W;                 // keys: the depth of a tile
constexpr int64_t AMX_PACKED = 4 * AMX_STEP;        // keys of one task of packing

// The keys and values of all heads.
struct AmxKeys {
  int64_t depth, width, slots;  // tiles that keys and values are wide; keys of a head, filled up
  Pair *keys;                   // (B·G, slots / W, depth) tiles
  Pair *values;                 // (B·G, slots / AMX_STEP, width) tiles
  uint8_t *finite;              // (B·G, slots) whether a key's values are

  AmxKeys(Arena &arena, const ExactInputs &in) {
    depth = (in.D + AMX_STEP - 1) / AMX_STEP;
    width = (in.E + W - 1) / W;
    slots = round_up(in.M, AMX_STEP);
    keys = arena.take<Pair>(in.B * in.G * slots / W * depth * TILE_NUMBERS);
    values = arena.take<Pair>(in.B * in.G * slots / AMX_STEP * width * TILE_NUMBERS);
    finite = arena.take<uint8_t>(in.B * in.G * slots);
  }

  Pair *key_tiles(int64_t bg, int64_t first) const { return keys + (bg * slots + first) / W * depth * TILE_NUMBERS; }
  Pair *value_tiles(int64_t bg, int64_t first) const {
    return values + (bg * slots + first) / AMX_STEP * width * TILE_NUMBERS;
  }
};

struct AmxScratch {
  Pair *rows, *queries;             // (Q',D') the queries, and across (D',Q')
  float *logits;                    // (AMX_KEYS,Q'), and the weights
  Pair *steps;                      // (W,E') pairs of rows of values
  Pair *values;                     // (AMX_KEYS / AMX_STEP, width) tiles with zeros for values that are not finite
  float *out, *out_rows;            // (E',Q'), and across (Q',E')
  float *base, *total, *shrink;     // (Q')
  float *all_out;                   // (E',Q') the sums of the keys before
  float *all_total, *all_base;      // (Q') and what these are relative to

  AmxScratch(Arena &arena, const ExactInputs &in) {
    const int64_t D = round_up(in.D, AMX_STEP) / 2, E = round_up(in.E, W), Q = AMX_QUERIES;
    rows = arena.take<Pair>(Q * D);
    queries = arena.take<Pair>(D * Q);
    logits = arena.take<float>(AMX_KEYS * Q);
    steps = arena.take<Pair>(W * E);
    values = arena.take<Pair>(AMX_KEYS / 2 * E);
    out = arena.take<float>(E * Q);
    out_rows = arena.take<float>(Q * E);
    base = arena.take<float>(Q);
    total = arena.take<float>(Q);
    shrink = arena.take<float>(Q);
    all_out = arena.take<float>(E * Q);
    all_total = arena.take<float>(Q);
    all_base = arena.take<float>(Q);
  }

  Pair *weights() const { return (Pair *)logits; }
};

static inline bool all_finite(const bf16 *row, int64_t width) {
  uint16_t others = 0;  // as wide as the numbers, for the compiler's vectors
  for (int64_t e = 0; e < width; e++) others |= (row[e].bits & 0x7f80) == 0x7f80;
  return others == 0;
}

// AMX_STEP keys and their values from `first` on, with zeros behind the last one.
static void pack_step(const ExactInputs &in, int64_t b, int64_t g, const Positions &keys, int64_t first,
                      const AmxKeys &packed, const AmxScratch &own) {
  const int64_t bg = b * in.G + g, E = packed.width * W;
  const int64_t count = keys.count - first < AMX_STEP ? keys.count - first : AMX_STEP;
  Pair *to = packed.key_tiles(bg, first);
  for (int64_t i = 0; i < AMX_STEP; i++)
    for (int64_t d = 0; d < packed.depth; d++) {
      const int64_t left = i < count ? in.D - d * AMX_STEP : 0;
      const bf16 *from = row_of<bf16>(in.key, b, g, left > 0 ? keys[first + i] : 0) + d * AMX_STEP;
      load_pairs(from, left < AMX_STEP ? left : AMX_STEP, to + (i / W * packed.depth + d) * TILE_NUMBERS + i % W * W, W);
    }
  for (int64_t i = 0; i < AMX_STEP; i += 2) {
    const bf16 *low = i < count ? row_of<bf16>(in.value, b, g, keys[first + i]) : nullptr;
    const bf16 *high = i + 1 < count ? row_of<bf16>(in.value, b, g, keys[first + i + 1]) : nullptr;
    load_rows_paired(low, high, low ? in.E : 0, own.steps + i / 2 * E, E);
    packed.finite[bg * packed.slots + first + i] = !low || all_finite(low, in.E);
    packed.finite[bg * packed.slots + first + i + 1] = !high || all_finite(high, in.E);
  }
  for (int64_t e = 0; e < packed.width; e++)
    pack_factors_across(own.steps + e * W, W, W, E, packed.value_tiles(bg, first) + e * TILE_NUMBERS, W);
}

// Logits to weights of `rows` keys, those behind the first `count` being 0, and what earlier sums shrink by. Whether any
// does: the base of a query's weights moves only when they would exceed 2⁴.
static bool weigh_keys(int64_t count, int64_t rows, int64_t lanes, float scale, const AmxScratch &own) {
  bool shrinks = false;
  const float bits = scale * 1.44269504f;
  for (int64_t v = 0; v < lanes; v += W) {
    const float *column = own.logits + v;
    Pair *to = own.weights() + v;  // in the logits' place, which have been read
    vf highs[4];
    for (vf &each : highs) each = splat(-__builtin_inff());
    int64_t j = 0;
    for (; j + 4 <= count; j += 4)
      UNROLL for (int i = 0; i < 4; i++) highs[i] = maximum(load(column + (j + i) * lanes), highs[i]);
    for (; j < count; j++) highs[0] = maximum(load(column + j * lanes), highs[0]);
    const vf high = maximum(maximum(highs[0], highs[1]), maximum(highs[2], highs[3]));
    const vf before = load(own.base + v);
    const vf now = select(high * bits > before * bits + 4, high, before);
    const vf base = select(now == splat(-__builtin_inff()), vf{}, now);
    vf sums = {}, more = {};
    for (j = 0; j + 2 <= count; j += 2, to += lanes) {
      const vf p = power_of_two((load(column + j * lanes) - base) * bits - (float)SHRUNK);
      const vf q = power_of_two((load(column + (j + 1) * lanes) - base) * bits - (float)SHRUNK);
      sums += p;
      more += q;
      store(to, paired(p, q));
    }
    if (j < count) {
      const vf p = power_of_two((load(column + j * lanes) - base) * bits - (float)SHRUNK);
      sums += p;
      store(to, paired(p, vf{}));
      j += 2, to += lanes;
    }
    for (; j < rows; j += 2, to += lanes) store(to, vu{});
    const vf shrink = select(before == now, splat(1), exp_nonpositive((before - base) * scale));
    store(own.base + v, now);
    store(own.shrink + v, shrink);
    store(own.total + v, load(own.total + v) * shrink + (sums + more));
    shrinks |= !all_set(shrink == splat(1));
  }
  return shrinks;
}

// As `add_span`.
static void add_packed_span(int64_t lanes, int64_t E, float scale, const AmxScratch &own) {
  for (int64_t v = 0; v < lanes; v += W) {
    const vf before = load(own.all_base + v), now = load(own.base + v);
    const vf base = select(now == splat(-__builtin_inff()), vf{}, now);
    const vf shrink = select(before == now, splat(1), exp_nonpositive((before - base) * scale));
    store(own.all_base + v, now);
    store(own.all_total + v, load(own.all_total + v) * shrink + load(own.total + v));
    store(own.total + v, vf{});
    for (int64_t e = v; e < E * lanes; e += lanes) {
      store(own.all_out + e, load(own.all_out + e) * shrink + load(own.out + e));
      store(own.out + e, vf{});
    }
  }
}

// Values of keys that some queries do not see, where these are not finite, as `add_apart`.
static const Pair *add_packed_apart(const ExactInputs &in, int64_t b, int64_t g, const Positions &keys, int64_t first,
                                    int64_t rows, int64_t first_query, int64_t queries, int64_t lanes,
                                    const AmxKeys &packed, const AmxScratch &own) {
  const int64_t bg = b * in.G + g, tiles = rows / AMX_STEP * packed.width;
  const Pair *values = packed.value_tiles(bg, first);
  for (int64_t j = 0; j < rows && first + j < keys.count; j++) {
    if (packed.finite[bg * packed.slots + first + j]) continue;
    const int64_t hidden = in.causal ? hidden_lanes(in, keys, first + j, first_query) : 0;
    if (hidden == 0) continue;
    if (values != own.values) __builtin_memcpy(own.values, values, tiles * TILE_NUMBERS * sizeof(Pair));
    values = own.values;
    const bf16 *row = row_of<bf16>(in.value, b, g, keys[first + j]);
    for (int64_t e = 0; e < in.E; e++) {
      for (int64_t q = hidden; q < queries; q++)
        own.out[e * lanes + q] += number_at(own.weights(), j, lanes, q) * widen(row[e]);
      Pair *pair = own.values + (j / AMX_STEP * packed.width + e / W) * TILE_NUMBERS + e % W * W + j % AMX_STEP / 2;
      pair->bits &= j % 2 ? 0x0000ffff : 0xffff0000;
    }
  }
  return values;
}

// The queries of a tile, across. Their sign is that of the scale, so that the largest product has the largest weight; a
// scale of 0 is theirs alone.
static void pack_queries(const ExactInputs &in, int64_t b, int64_t h, int64_t first, int64_t queries, int64_t lanes,
                         int64_t D, const AmxScratch &own) {
  pack_factor_rows<bf16>(in.query, b, h, nullptr, first, queries, in.D, own.rows, D);
  if (in.scale <= 0)
    for (int64_t i = 0; i < 2 * queries * D; i++) {
      bf16 *number = (bf16 *)own.rows + i;
      narrow(in.scale < 0 ? -widen(*number) : 0 * widen(*number), number);
    }
  for (int64_t i = queries * D; i < lanes * D; i++) own.rows[i] = {};
  pack_factors_across(own.rows, lanes, D, D, own.queries, lanes);
}

static void attend_by_amx(const ExactForward &a, int64_t b, int64_t h, int64_t first_query, const Positions &keys,
                          const AmxKeys &packed, const AmxScratch &own) {
  const ExactInputs &in = a.inputs;
  const TilesInUse in_use;
  const int64_t g = h / (in.H / in.G), left = in.N - first_query, E = packed.width * W, D = packed.depth * W;
  const int64_t queries = left < AMX_QUERIES ? left : AMX_QUERIES, lanes = round_up(queries, W);
  const float scale = in.scale == 0 ? 1 : in.scale < 0 ? -in.scale : in.scale;
  pack_queries(in, b, h, first_query, queries, lanes, D, own);
  for (int64_t i = 0; i < lanes; i++) {
    own.base[i] = own.all_base[i] = -__builtin_inff();
    own.total[i] = own.all_total[i] = 0;
  }
  zero(own.out, E * lanes);
  const int64_t seen = is_padding(in, b, first_query, queries) ? 0 : seen_keys(in, keys, first_query + queries - 1);
  const bool one_span = seen <= AMX_SPAN;
  if (!one_span) zero(own.all_out, E * lanes);
  const int64_t by_all = seen_keys(in, keys, first_query);
  for (int64_t first = 0; first < seen; first += AMX_KEYS) {
    const int64_t count = seen - first < AMX_KEYS ? seen - first : AMX_KEYS, rows = round_up(count, AMX_STEP);
    if (first > 0 && first % AMX_SPAN == 0) add_packed_span(lanes, E, scale, own);
    const Tiles<const Pair> key = {packed.key_tiles(b * in.G + g, first), D * W, TILE_NUMBERS, W};
    const Tiles<float> logits = {own.logits, W * lanes, W, lanes};
    multiply_tiles(rows / W, lanes / W, packed.depth, key, {own.queries, W * lanes, W, lanes}, logits, false);
    if (first + count > by_all) hide_later(in, keys, first, count, first_query, lanes, own.logits);
    if (weigh_keys(count, rows, lanes, scale, own) && first > 0)
      for (int64_t e = 0; e < E; e++)
        for (int64_t v = 0; v < lanes; v += W)
          store(own.out + e * lanes + v, load(own.out + e * lanes + v) * load(own.shrink + v));
    const Pair *value = packed.value_tiles(b * in.G + g, first);
    if (first + rows > by_all)
      value = add_packed_apart(in, b, g, keys, first, rows, first_query, queries, lanes, packed, own);
    multiply_tiles(packed.width, lanes / W, rows / AMX_STEP, {value, TILE_NUMBERS, E * W, W},
              {own.weights(), W * lanes, W, lanes}, {own.out, W * lanes, W, lanes}, true);
  }
  if (!one_span) add_packed_span(lanes, E, scale, own);
  const float *base = one_span ? own.base : own.all_base, *total = one_span ? own.total : own.all_total;
  pack_transposed(one_span ? own.out : own.all_out, E, lanes, lanes, own.out_rows, E);
  for (int64_t i = 0; i < queries; i++)
    write_query<bf16>(a, b, h, keys, first_query + i, base[i] * scale, total[i], own.out_rows + i * E);
}

static int64_t exact_forward_by_amx(const ExactForward &a, Arena &arena, const Masks &keys) {
  const ExactInputs &in = a.inputs;
  const AmxKeys packed(arena, in);
  const PerThread<AmxScratch> scratch(arena, in.threads, in);
  if (!arena.base) return arena.used;
  const int64_t shares = (in.M + AMX_PACKED - 1) / AMX_PACKED, tiles = (in.N + AMX_QUERIES - 1) / AMX_QUERIES;
  const Stage packing = {in.B * in.G * shares, [&](int64_t task, int thread) {
    const int64_t bg = task / shares, b = bg / in.G, from = task % shares * AMX_PACKED;
    const Positions of = keys.of(b);
    for (int64_t first = from; first < from + AMX_PACKED && first < of.count; first += AMX_STEP)
      pack_step(in, b, bg % in.G, of, first, packed, scratch.of[thread]);
  }};
  const Stage attending = {in.B * in.H * tiles, [&](int64_t task, int thread) {
    const int64_t bh = task / tiles, tile = tiles - 1 - task % tiles;  // the last of a causal head take longest
    attend_by_amx(a, bh / in.H, bh % in.H, tile * AMX_QUERIES, keys.of(bh / in.H), packed, scratch.of[thread]);
  }};
  parallel_stages(in.threads, packing, attending);
  return arena.used;
}

#endif
