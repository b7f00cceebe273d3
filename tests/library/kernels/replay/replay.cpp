// Runs the recorded calls of a file on a native library, and compares what they write with what the file expects.
//
//     replay LIBRARY FILE [VARIANT …]
//
// recording.py describes the file. Without names, each variant that runs here is called. Prints a line for each variant and
// kernel, and for each comparison that fails; returns 1 if any does.
#include <dlfcn.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

static void fail(const std::string &what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(2);
}

static void *aligned(size_t bytes) { return std::aligned_alloc(64, (bytes + 127) / 64 * 64); }

struct File {
  const char *at, *end;
  const char *take(int64_t bytes) {
    if (bytes < 0 || bytes > end - at) fail("the file ends too early");
    at += bytes;
    return at - bytes;
  }
  template <class T>
  T number() {
    T x;
    std::memcpy(&x, take(sizeof x), sizeof x);
    return x;
  }
  int64_t integer() { return number<int64_t>(); }
  std::string text() {
    const int64_t length = integer();
    return std::string(take(length), length);
  }
};

static float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// An element of a floating-point dtype, by its number in recording.py.
static double element(const char *at, int64_t dtype) {
  uint16_t half;
  float single;
  double exact;
  std::memcpy(&half, at, sizeof half);
  if (dtype == 0) return std::memcpy(&single, at, sizeof single), single;
  if (dtype == 1) return as_float((uint32_t)half << 16);
  if (dtype == 3) return std::memcpy(&exact, at, sizeof exact), exact;
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const double size = exponent == 31 ? (fraction ? NAN : INFINITY)
                      : exponent     ? std::ldexp(1024 + fraction, exponent - 25)
                                     : std::ldexp(fraction, -24);
  return half >> 15 ? -size : size;
}

static int64_t whole(const char *at, int64_t dtype) {
  int32_t small;
  int64_t large;
  if (dtype == 4) return std::memcpy(&small, at, sizeof small), small;
  return std::memcpy(&large, at, sizeof large), large;
}

// The largest error in units of what is tolerated; infinity where whole numbers differ.
static double compare(File &file, const std::vector<char *> &buffers) {
  constexpr int64_t BYTES[] = {4, 2, 2, 8, 4, 8};
  const int64_t buffer = file.integer(), offset = file.integer(), dtype = file.integer(), axes = file.integer();
  std::vector<int64_t> sizes(axes), strides(axes), index(axes);
  for (int64_t &size : sizes) size = file.integer();
  for (int64_t &stride : strides) stride = file.integer();
  const double absolute = file.number<double>(), relative = file.number<double>();
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  double worst = 0;
  for (int64_t i = 0; i < count; i++) {
    int64_t place = 0;
    for (int64_t axis = axes - 1, left = i; axis >= 0; left /= sizes[axis--]) place += left % sizes[axis] * strides[axis];
    const char *at = buffers[buffer] + offset + place * BYTES[dtype];
    if (dtype >= 4) {
      if (whole(at, dtype) != file.integer()) worst = INFINITY;
      continue;
    }
    const double have = element(at, dtype), want = file.number<double>();
    if (have == want || (std::isnan(have) && std::isnan(want))) continue;  // equal infinities too
    const double error = std::fabs(have - want) / (absolute + relative * std::fabs(want));
    worst = error <= worst ? worst : error;  // NaN is an error that is taken over
    if (std::isnan(error)) worst = INFINITY;
  }
  return worst;
}

struct Total {
  int64_t calls = 0, comparisons = 0;
  double worst = 0;
};

// One case in one variant; `totals` are of kernels. Returns how many comparisons failed.
static int64_t run_case(File &file, void *library, const std::string &variant, std::map<std::string, Total> &totals) {
  const std::string name = file.text();
  std::vector<char *> buffers(file.integer());
  for (char *&buffer : buffers) {
    const int64_t length = file.integer();
    buffer = (char *)aligned(length);
    std::memcpy(buffer, file.take(length), length);
  }
  for (int64_t left = file.integer(); left > 0; left--) {
    const int64_t in = file.integer(), at = file.integer(), to = file.integer(), offset = file.integer();
    const char *address = buffers[to] + offset;
    std::memcpy(buffers[in] + at, &address, sizeof address);
  }
  std::string kernels;
  for (int64_t left = file.integer(); left > 0; left--) {
    const std::string kernel = file.text();
    const char *arguments = buffers[file.integer()];
    const auto function = (int64_t (*)(const void *, void *))dlsym(library, ("subquad_" + kernel).c_str());
    if (!function) fail("the library has no kernel " + kernel);
    const int64_t bytes = function(arguments, nullptr);
    if (bytes < 0) fail(name + ": " + kernel + " states no size of its workspace");
    void *workspace = aligned(bytes);
    std::memset(workspace, 0xff, bytes);
    if (function(arguments, workspace) < 0) fail(name + ": " + kernel + " refuses its lists");
    std::free(workspace);
    totals[kernel].calls++;
    kernels += " " + kernel;
  }
  int64_t failed = 0;
  for (int64_t left = file.integer(); left > 0; left--) {
    const std::string what = file.text();
    const double worst = compare(file, buffers);
    if (!(worst <= 1)) {
      failed++;
      std::printf("%s: %s: %s: %g times what is tolerated\n", variant.c_str(), name.c_str(), what.c_str(), worst);
    }
    std::istringstream names(kernels);
    for (std::string kernel; names >> kernel;) {
      Total &total = totals[kernel];
      total.comparisons++;
      total.worst = std::fmax(total.worst, worst);
    }
  }
  for (char *buffer : buffers) std::free(buffer);
  return failed;
}

int main(int count, char **given) {
  if (count < 3) fail("replay LIBRARY FILE [VARIANT …]");
  void *library = dlopen(given[1], RTLD_NOW);
  if (!library) fail(dlerror());
  std::ifstream stream(given[2], std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(stream)), {});
  const auto text_of = [&](const char *name) { return std::string(((const char *(*)())dlsym(library, name))()); };
  const auto use = (int (*)(const char *))dlsym(library, "subquad_use_variant");
  std::vector<std::string> variants(given + 3, given + count);
  std::istringstream names(text_of("subquad_variants"));
  if (variants.empty())
    for (std::string name; names >> name;) variants.push_back(name);
  int64_t failed = 0;
  for (const std::string &variant : variants) {
    if (use(variant.c_str()) < 0) fail("the variant " + variant + " does not run here");
    File file = {bytes.data(), bytes.data() + bytes.size()};
    if (file.text() != text_of("subquad_interface")) fail("the file was recorded from another interface");
    std::map<std::string, Total> totals;
    for (int64_t left = file.integer(); left > 0; left--) failed += run_case(file, library, variant, totals);
    for (const auto &[kernel, total] : totals)
      std::printf("%s %s: %lld calls, %lld comparisons, largest error %.2g of what is tolerated\n", variant.c_str(),
                  kernel.c_str(), (long long)total.calls, (long long)total.comparisons, total.worst);
  }
  return failed > 0;
}
