// Hands out pieces of the workspace; with no workspace it only adds up how much is needed. Under AddressSanitizer a fence
// stands behind every piece.

#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t FENCE = 64;
#else
constexpr int64_t FENCE = 0;
#endif

struct Arena {
  char *base;
  int64_t used = 0;

  template <class T>
  T *take(int64_t count) {
    const int64_t bytes = count * (int64_t)sizeof(T), whole = round_up(bytes, 64);
    char *piece = base ? base + used : nullptr;
#if defined(__SANITIZE_ADDRESS__)
    if (piece) __asan_poison_memory_region(piece + bytes, whole - bytes + FENCE);
#endif
    used += whole + FENCE;
    return (T *)piece;
  }
};
