// Hands out pieces of the workspace. A kernel takes its pieces in every call, also in the one without a workspace, which
// only adds up how much is needed: the two cannot disagree. Under AddressSanitizer a fence is on both sides of a piece:
//
//     | fence | piece, up to a whole cache line | fence | fence | piece … | fence |

#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t FENCE = 512;  // as wide as the rows that a wrong number would step over
#else
constexpr int64_t FENCE = 0;
#endif

// Pieces of one size, one for each head, thread or chunk. Without fences they adjoin.
template <class T>
struct Pieces {
  T *first;
  int64_t pitch;  // elements from one to the next
  T *operator[](int64_t i) const { return first + i * pitch; }
};

struct Arena {
  char *base;
  int64_t used = 0;

  template <class T>
  T *take(int64_t count) {
    const int64_t bytes = count * (int64_t)sizeof(T), whole = round_up(bytes, 64);
    char *piece = base ? base + used + FENCE : nullptr;
#if defined(__SANITIZE_ADDRESS__)
    if (piece) __asan_poison_memory_region(piece - FENCE, FENCE);
    if (piece) __asan_poison_memory_region(piece + bytes, whole - bytes + FENCE);
#endif
    used += FENCE + whole + FENCE;
    return (T *)piece;
  }

  // Vector loops may read and write `past` elements behind a piece. Without fences those belong to the next piece, so
  // nobody may rely on what they hold.
  template <class T>
  Pieces<T> take_each(int64_t pieces, int64_t count, int64_t past = 0) {
    if (FENCE == 0) return {take<T>(pieces * count + past), count};
    const int64_t before = used;
    T *first = take<T>(count + past);
    const int64_t pitch = (used - before) / (int64_t)sizeof(T);
    for (int64_t i = 1; i < pieces; i++) take<T>(count + past);
    return {first, pitch};
  }
};
