// How a structure of the C interface describes itself to Python: the name, kind and place of each of its fields.
#pragma once
#include <cstddef>
#include <cstdint>

enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// Rows of contiguous elements, one for each (batch item, head, token); strides count elements.
struct Rows {
  void *data;
  int64_t batch, head, token;
};
struct RowsOut : Rows {};  // that a kernel writes: Python may not hand it a copy

// Inlined even in unoptimised builds: outside of the variants' namespaces, the linker would keep one function for all, which
// could be one that this processor cannot run.
template <class T>
struct List {
  const T *items;
  int64_t count;
  __attribute__((always_inline)) const T *begin() const { return items; }
  __attribute__((always_inline)) const T *end() const { return items + count; }
  __attribute__((always_inline)) const T &operator[](int64_t i) const { return items[i]; }
};

// What Python must put into a field: a number, rows, the address of numbers, other structures or a list of them.
struct Kind {
  const char *of, *how;
};

struct Field {
  const char *name;
  Kind kind;
  size_t offset, size, alignment;
};

template <class T>
struct Layout;  // of a described structure: its NAME, and its FIELDS in order

template <class T>
struct KindOf {
  static constexpr Kind is = {Layout<T>::NAME, ""};
};
#define KIND(type, text)                        \
  template <>                                   \
  struct KindOf<type> {                         \
    static constexpr Kind is = {text, ""};      \
  };
KIND(uint8_t, "bool")
KIND(int32_t, "int32")
KIND(int64_t, "int64")
KIND(float, "float32")
KIND(double, "float64")
KIND(Dtype, "dtype")
KIND(Rows, "rows")
KIND(RowsOut, "rows out")
#undef KIND
template <class T>
struct KindOf<const T *> {
  static constexpr Kind is = {KindOf<T>::is.of, "*"};
};
template <class T>
struct KindOf<T *> {
  static constexpr Kind is = {KindOf<T>::is.of, "* out"};
};
template <class T>
struct KindOf<List<T>> {
  static constexpr Kind is = {Layout<T>::NAME, " list"};
};

// Whether the fields follow each other and fill the structure.
template <class T>
constexpr bool is_whole() {
  auto aligned = [](size_t end, size_t to) { return (end + to - 1) / to * to; };
  size_t end = 0;
  for (const Field &field : Layout<T>::FIELDS) {
    if (field.offset != aligned(end, field.alignment)) return false;
    end = field.offset + field.size;
  }
  return aligned(end, alignof(T)) == sizeof(T);
}

// DESCRIBE(Structure, its fields in order). One that is left out, twice there or out of order does not compile.
#define DESCRIBE(Structure, ...)                                       \
  template <>                                                          \
  struct Layout<Structure> {                                           \
    using Of = Structure;                                              \
    static constexpr const char *NAME = #Structure;                    \
    static constexpr Field FIELDS[] = {FOR_EACH(FIELD, __VA_ARGS__)};  \
  };                                                                   \
  static_assert(is_whole<Structure>(), "DESCRIBE does not name the fields of " #Structure " in their order");
#define FIELD(field) \
  {#field, KindOf<decltype(Of::field)>::is, offsetof(Of, field), sizeof(Of::field), alignof(decltype(Of::field))},

// FOR_EACH(MACRO, a, b, …) is MACRO(a) MACRO(b) …. A macro cannot call itself: each step leaves one that the next scan of
// the text finishes, and there are 64 scans.
#define FOR_EACH(macro, ...) __VA_OPT__(SCAN_64(EACH(macro, __VA_ARGS__)))
#define EACH(macro, first, ...) macro(first) __VA_OPT__(EACH_LATER PARENTHESES(macro, __VA_ARGS__))
#define EACH_LATER() EACH
#define PARENTHESES ()
#define SCAN_64(...) SCAN_16(SCAN_16(SCAN_16(SCAN_16(__VA_ARGS__))))
#define SCAN_16(...) SCAN_4(SCAN_4(SCAN_4(SCAN_4(__VA_ARGS__))))
#define SCAN_4(...) SCAN(SCAN(SCAN(SCAN(__VA_ARGS__))))
#define SCAN(...) __VA_ARGS__
