// Buckets as lists without gaps: the queries and keys of each, and every token's places in them.
//
//     slots      bucket 0: 3 7 · 9      bucket 1: · 1 · 3        · is an empty slot
//     tokens     3 7 9 1 3
//     starts     0     3   5                                     bucket c has tokens[starts[c] … starts[c + 1])
//     places     of 1: 3      of 3: 0 4      of 7: 1      of 9: 2
//
// What a token gets is computed bucket by bucket, into its places, and then added place by place.

struct Listing {
  int32_t *tokens;  // (slots) of the buckets, one after the other
  int32_t *starts;  // (buckets + 1) of each bucket in `tokens`
  int32_t *places;  // (slots) of the tokens, one after the other: the indices of each in `tokens`, ascending
  int32_t *firsts;  // (positions + 1) of each token in `places`

  Listing(Arena &arena, int64_t slots, int64_t buckets, int64_t positions) {
    tokens = arena.take<int32_t>(slots);
    starts = arena.take<int32_t>(buckets + 1);
    places = arena.take<int32_t>(slots);
    firsts = arena.take<int32_t>(positions + 1);
  }

  int64_t size(int64_t bucket) const { return starts[bucket + 1] - starts[bucket]; }

  // A counting sort of the places by the token there.
  void find_places(int64_t buckets, int64_t positions) const {
    sort_by_label(tokens, Positions{nullptr, starts[buckets]}, positions, places, firsts);
  }
};

// How many slots and buckets a head has in all sets together.
struct Extent {
  int64_t buckets = 0, queries = 0, keys = 0, most_keys = 0;

  Extent(const List<BucketSet> &of) {
    for (const BucketSet &set : of) {
      queries += set.blocks * set.query_slots;
      most_keys = set.key_slots > most_keys ? set.key_slots : most_keys;
      if (set.first < buckets) continue;  // the keys are those of an earlier set
      buckets += set.buckets;
      keys += set.buckets * set.key_slots;
    }
  }
};

// One comparison for both ends: a negative number is a large one without its sign.
static inline bool filled(int64_t slot, int64_t positions) { return (uint64_t)slot < (uint64_t)positions; }

static void list_keys(const List<BucketSet> &of, int64_t bh, int64_t M, const Listing &to) {
  int64_t bucket = 0;
  int32_t count = to.starts[0] = 0;
  for (const BucketSet &set : of) {
    const int64_t *slots = set.keys + bh * set.buckets * set.key_slots;
    if (set.first < bucket) continue;  // listed with the earlier set
    for (int64_t c = 0; c < set.buckets; c++, slots += set.key_slots) {
      for (int64_t k = 0; k < set.key_slots; k++) {
        to.tokens[count] = (int32_t)slots[k];  // written always, and kept where the slot is filled
        count += filled(slots[k], M);
      }
      to.starts[++bucket] = count;
    }
  }
}

// Calls run(bucket, query) for every filled slot, block after block. A block of no bucket is passed over.
template <class Run>
static void for_queries(const List<BucketSet> &of, int64_t bh, int64_t N, Run &&run) {
  for (const BucketSet &set : of) {
    const int64_t *slots = set.queries + bh * set.blocks * set.query_slots;
    for (int64_t t = 0; t < set.blocks; t++, slots += set.query_slots) {
      const int64_t bucket = set.bucket ? set.bucket[bh * set.blocks + t] : t;
      if (!filled(bucket, set.buckets)) continue;
      for (int64_t slot = 0; slot < set.query_slots; slot++)
        if (filled(slots[slot], N)) run(set.first + bucket, (int32_t)slots[slot]);
    }
  }
}

// Blocks of one bucket come together, in the order of the sets and of the blocks.
static void list_queries(const List<BucketSet> &of, int64_t bh, int64_t N, int64_t buckets, const Listing &to) {
  for (int64_t c = 0; c <= buckets; c++) to.starts[c] = 0;
  for_queries(of, bh, N, [&](int64_t bucket, int32_t) { to.starts[bucket + 1]++; });
  for (int64_t c = 0; c < buckets; c++) to.starts[c + 1] += to.starts[c];
  for_queries(of, bh, N, [&](int64_t bucket, int32_t query) { to.tokens[to.starts[bucket]++] = query; });
  for (int64_t c = buckets; c > 0; c--) to.starts[c] = to.starts[c - 1];
  to.starts[0] = 0;
}

// Which keys a query sees by their numbers: low ≤ key ≤ high, not its own number where that is forbidden, and none that
// is marked as hidden. The position of query i among the keys:
//
//     keys   0 ── low ────── i + offset ────── high ── M − 1
//                  └── span ──┘ └── span ──┘                 under `causal`, high is i + offset
struct Seen {
  int32_t low, high, self;
  const uint8_t *hidden;
};

constexpr int32_t LAST_NUMBER = INT32_MAX - 1;  // INT32_MAX is the filling, which nobody sees

static inline int32_t as_number(int64_t x) {
  return x > LAST_NUMBER ? LAST_NUMBER : x < INT32_MIN ? INT32_MIN : (int32_t)x;
}

// The sum of two whole numbers, or the nearest to it that there is.
static inline int64_t added(int64_t a, int64_t b) {
  int64_t sum;
  return !__builtin_add_overflow(a, b, &sum) ? sum : a < 0 ? INT64_MIN : INT64_MAX;
}

static Seen seen_by(const BucketInputs &in, int64_t span, int64_t b, int64_t h, int64_t query) {
  const int64_t at = added(query, in.offsets ? in.offsets[b] : in.offset);
  return {span >= 0 ? as_number(added(at, -span)) : INT32_MIN,
          in.causal ? as_number(at) : span >= 0 ? as_number(added(at, span)) : LAST_NUMBER,
          in.other_keys_only ? (int32_t)query : -1,
          in.hidden ? in.hidden + ((b * in.H + h) * in.hidden_rows + query % in.hidden_rows) * in.M : nullptr};
}

static inline bool sees_all(const BucketInputs &in, int64_t span) {
  return !in.causal && span < 0 && !in.other_keys_only && !in.hidden && !in.of_distance.data;
}

// How far queries and keys of a bucket may be apart.
static int64_t span_of(const List<BucketSet> &of, int64_t bucket) {
  int64_t i = 0;
  while (bucket < of[i].first || bucket >= of[i].first + of[i].buckets) i++;
  return of[i].span;
}

// Which of W keys are seen.
static inline vi visible_keys(const int32_t *numbers, const Seen &seen) {
  const vi number = *(const vi_anywhere *)numbers;
  vi visible = (number >= seen.low) & (number <= seen.high) & (number != seen.self);
  if (seen.hidden)
    for (int64_t l = 0; l < W; l++)  // the filling has numbers past the last key, and a bias of −∞
      if (numbers[l] != INT32_MAX && seen.hidden[numbers[l]]) visible[l] = 0;
  return visible;
}

// What a query's logits get by distance: the term of key j is at j − start. Beyond the terms a query sees no key.
struct Terms {
  const float *of;
  int64_t start, count;

  Terms(const BucketInputs &in, int64_t span, int64_t b, int64_t h, int64_t query) {
    of = !in.of_distance.data ? nullptr : row_of<float>(in.of_distance, b, h, in.distance_rows == 1 ? 0 : query);
    start = added(added(query, in.offsets ? in.offsets[b] : in.offset), -span);
    count = in.distances;
  }

  uint64_t place(int32_t number) const { return (uint64_t)number - (uint64_t)start; }  // below `count` where there is one

  float operator[](int32_t number) const {
    return place(number) < (uint64_t)count ? of[place(number)] : -__builtin_inff();
  }
};

// The terms of W keys.
static inline vf terms_of(const Terms &terms, const int32_t *numbers) {
  vf found;
  for (int64_t l = 0; l < W; l++) found[l] = terms[numbers[l]];
  return found;
}

static inline vi not_minus_infinity(vf x) { return ~(x == splat(-__builtin_inff())); }

// Logits of W keys: scaled, with their bias; −∞ where they are not seen.
static inline vf visible_logits(const float *products, float scale, const float *bias, const int32_t *numbers,
                                const Seen *seen) {
  const vf logits = load(products) * scale + load(bias);
  return seen ? select(visible_keys(numbers, *seen), logits, splat(-__builtin_inff())) : logits;
}

// The numbers and biases of a chunk of a bucket's keys; the filling up to whole vectors has −∞.
static void pack_numbers(const int32_t *keys, int64_t count, const float *key_bias, int32_t *numbers, float *bias) {
  for (int64_t j = 0; j < round_up(count, W); j++) {
    numbers[j] = j < count ? keys[j] : INT32_MAX;
    bias[j] = j >= count ? -__builtin_inff() : key_bias ? key_bias[keys[j]] : 0.0f;
  }
}

// Heads that are worked on together: enough to keep the threads busy, and as many as fit in a little memory.
static inline int64_t heads_at_once(int64_t heads, int64_t threads, int64_t bytes_of_one) {
  const int64_t fit = (32 << 20) / (bytes_of_one + 1), busy = 2 * threads, wave = fit > busy ? fit : busy;
  return heads < wave ? heads : wave;
}
