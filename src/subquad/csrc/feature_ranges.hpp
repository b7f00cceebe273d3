// Attention by features in ranges of the sequence: which tokens a range adds to the state, and the state before it.
//
//     tokens                     range 0     range 1     range 2
//     sum: the state of range       1           2                     is what the range adds (of queries: 0 ← 1 ← 2)
//     combine                    state 0  +  state 1  +  state 2      running sums
//
// After that a range's state holds all tokens before it (of queries: behind it), and ranges can be worked on side by side.

constexpr int64_t RANGE = 512;  // tokens of a range at least

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
    const bool busy = threads == 1 || states % threads == 0 || states >= 4 * threads;
    const int64_t wanted = busy ? 1 : (4 * threads + states - 1) / states, share = (tokens + wanted - 1) / wanted;
    size = round_up(share > RANGE ? share : RANGE, unit);
    count = tokens > size ? (tokens + size - 1) / size : 1;
  }
};

// States of one side for all (batch item, key head), one for each range.
struct RangeStates {
  FeatureState *of;
  Ranges ranges;
  int64_t shift;   // a range adds the tokens this far behind its own
  int64_t onwards; // where its state is needed: 1 in the range after it, −1 before it, 0 everywhere

  // Of keys, which later tokens read, or of queries, which earlier ones read.
  RangeStates(Arena &arena, const FeatureInputs &in, int64_t tokens, const Visible &visible, bool of_keys)
      : ranges(in.B * in.G, tokens, visible.unit(), in.threads),
        shift(of_keys ? visible.shift() : -visible.shift()),
        onwards(visible.all() ? 0 : of_keys ? 1 : -1) {
    const int64_t states = in.B * in.G * ranges.count;
    of = arena.take<FeatureState>(states);
    for (int64_t i = 0; i < states; i++) {
      const FeatureState state(arena, in.features, in.E);
      if (arena.base) of[i] = state;
    }
  }

  int64_t tasks(const FeatureInputs &in) const { return in.B * in.G * ranges.count; }
  int64_t groups(const FeatureInputs &in) const { return ranges.count > 1 ? in.B * in.G : 0; }  // whose states are combined

  // What range `task` adds, as the state of the range that needs it.
  void sum(const FeatureInputs &in, const FeatureSide &side, int64_t task, const FeatureScratch &own) const {
    const int64_t group = task / ranges.count, range = task % ranges.count;
    const int64_t target = (range + onwards + ranges.count) % ranges.count, from = range * ranges.size - shift;
    const FeatureState &state = of[group * ranges.count + target];
    state.clear();
    const bool first = onwards > 0 ? target == 0 : onwards < 0 && target == ranges.count - 1;
    if (!first) add_tokens(state, side, in.E, group / in.G, group % in.G, from, from + ranges.size, own);
  }

  // Every range's state to that of all tokens that come before it; without an order, the first range's to that of all.
  void combine(int64_t group) const {
    const FeatureState *states = of + group * ranges.count;
    for (int64_t i = 1; i < ranges.count; i++) {
      if (onwards > 0) states[i].add(states[i - 1]);
      if (onwards < 0) states[ranges.count - 1 - i].add(states[ranges.count - i]);
      if (onwards == 0) states[0].add(states[i]);
    }
  }

  const FeatureState &at(int64_t group, int64_t range) const { return of[group * ranges.count + range]; }
};
