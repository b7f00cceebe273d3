// Which positions of an item are valid. Everything below works on their ranks, so that padding costs nothing.

struct Positions {
  const int32_t *at;  // null: every position is valid
  int64_t count;
  int64_t operator[](int64_t rank) const { return at ? at[rank] : rank; }
};

struct Masks {
  Pieces<int32_t> at;  // (B, positions), or null
  int64_t *counts;  // (B), or null
  int64_t positions;

  Masks(Arena &arena, const uint8_t *valid, int64_t B, int64_t positions) : at{}, counts(nullptr), positions(positions) {
    if (!valid) return;
    at = arena.take_each<int32_t>(B, positions);
    counts = arena.take<int64_t>(B);
    if (!arena.base) return;
    for (int64_t b = 0; b < B; b++) {
      int64_t count = 0;
      for (int64_t i = 0; i < positions; i++) {
        at[b][count] = (int32_t)i;  // written always, and kept where the position is valid: no branch on the data
        count += valid[b * positions + i] != 0;
      }
      counts[b] = count;
    }
  }

  Positions of(int64_t b) const {
    return counts ? Positions{at[b], counts[b]} : Positions{nullptr, positions};
  }
};
