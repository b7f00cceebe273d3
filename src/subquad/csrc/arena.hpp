// Hands out pieces of the workspace; with no workspace it only adds up how much is needed. Under AddressSanitizer a fence
// stands before and behind every piece:
//
//     | fence | piece, up to a whole cache line | fence | fence | piece … | fence |

#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t FENCE = 512;  // as wide as the rows that a wrong number would step over
#else
constexpr int64_t FENCE = 0;
#endif

// Pieces of one size: of heads, threads or chunks. Without fences they adjoin.
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

  // `past` more elements may be read and written behind a piece: the next piece's, where there are no fences, so that
  // nobody may rely on them.
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
