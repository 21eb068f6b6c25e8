// Linear layers whose weights are stored in fewer bits than float32 has, without a loss.
//
// Many checkpoints are published in bfloat16 or quantized, and a float32 that was made of 2 to 16 bits
// is made of them again as it is needed. A token's products wait for weights from memory, so
// they are faster by what is not read.
//
// Bits are those of oneDNN's products (brgemm): per output, the products of so many numbers at a time,
// 1,024 with AVX2 and often 512 with AVX-512, are one chain of multiply-adds that begins at 0, and the
// chains are added in order. Which rows and threads there are does not matter. `engine.models.packing` finds the length of the
// chains, and compares the bits of each shape before it uses it.
//
// Layout: 32 outputs make a panel and 32 inputs a group, so weights are [outputs / 32, inputs / 32,
// bytes of a group], after a line that tells their kind. In a group, the inputs that share a word of 32
// bits stand together, and each word is followed by those of the other outputs.

#pragma once

#include "tensors.h"

#include <immintrin.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <iterator>
#include <optional>
#include <utility>

namespace {

constexpr int64_t kOutputs = 32, kGroup = 32;
constexpr int64_t kManyRows = 64;
constexpr int64_t kAtOnce = 128;        // inputs whose weights rows share in the nearest cache,
constexpr int64_t kAtOnceOfMany = 512;  // and in the next one, for many rows
constexpr int64_t kPanelsAtOnce = 4;    // that read many rows while these are in a cache
constexpr int64_t kRowsAtOnce = kLanes == 16 ? 512 : 384;  // rows of a piece of work, at most,
constexpr int64_t kRowsAtLeast = 96;    // and fewer where threads would wait for each other
constexpr int kVectors = kOutputs / kLanes;
constexpr int kMostRows = kLanes == 16 ? 12 : 6;  // whose sums the registers hold,
constexpr int kAtATime = 2;                       // of so many vectors of outputs
constexpr int kFewRows = kLanes == 16 ? 8 : 3;    // for so many, weights go into registers at once

typedef uint32_t Words __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4)));

Ints nearest(Floats x) {
  Floats rounded;
  Lanes(x).round().store(&rounded);
  return __builtin_convertvector(rounded, Ints);
}

bool any(Ints x) {
  int32_t all = 0;
  for (int i = 0; i < kLanes; ++i) all |= x[i];
  return all;
}

// The forms of a weight that was made of a whole number n. `find` fills in the numbers of so many
// weights and what else makes each of them again, if there are such: `given`.

// step * n, n of either sign. With few bits each, the product is exact and so is a quotient.
struct Product {
  static constexpr int kGiven = 1;  // step
  static constexpr bool kSigned = true;

  template <int kCount>
  [[gnu::noinline]] static bool find(const float* w, int bits, float* given, int32_t* n) {
    const float limit = static_cast<float>(1 << (bits - 1));
    float least = INFINITY, most = 0;
    for (int k = 0; k < kCount; ++k) {
      const float size = std::abs(w[k]);
      most = std::max(most, size);
      least = size > 0 ? std::min(least, size) : least;
    }
    if (most == 0) return fits<kCount>(w, bits, 0, given, n);
    for (float parts = 1; most / least * parts < limit + 1; ++parts)
      for (const float step : {least / parts, -least / parts})
        if (fits<kCount>(w, bits, step, given, n)) return true;
    return false;
  }

  template <int kCount>
  [[gnu::noinline]] static bool fits(const float* w, int bits, float step, float* given, int32_t* n) {
    const int32_t limit = 1 << (bits - 1);
    const Floats steps = Floats{} + step;
    Ints wrong = {};
    for (int k = 0; k < kCount; k += kLanes) {
      const Floats weights = *reinterpret_cast<const Floats*>(w + k);
      // Zeros without a step have the signs of their numbers.
      const Ints number = step == 0 ? (Ints)weights >> 31 : nearest(weights / steps);
      wrong |= (number < -limit) | (number >= limit);
      wrong |= (Ints)made(number, &steps) != (Ints)weights;
      *reinterpret_cast<Ints*>(n + k) = number;
    }
    given[0] = step;
    return !any(wrong);
  }

  static Floats made(Ints n, const Floats* given, int = 0) {
    return *given * __builtin_convertvector(n, Floats);
  }
};

// step * n + least, rounded once.
struct Sum {
  static constexpr int kGiven = 2;  // step, least
  static constexpr bool kSigned = false;

  template <int kCount>
  [[gnu::noinline]] static bool find(const float* w, int bits, float* given, int32_t* n) {
    const auto [low, high] = std::minmax_element(w, w + kCount);
    if (*low == *high) return fits<kCount>(w, bits, std::copysign(0.f, *low), *low, given, n);
    const int limit = (1 << bits) - 1;
    const double unsure = std::ldexp(std::max(std::abs(*low), std::abs(*high)), -24);
    for (const auto [first, last] : {std::pair(*low, *high), std::pair(*high, *low)})
      for (int span = limit; span > 0; --span) {
        const float step = simplest((double(last) - first) / span, 2 * unsure / span);
        for (int before = 0; before + span <= limit; ++before) {
          const float least = before ? simplest(first - double(step) * before, unsure) : first;
          if (fits<kCount>(w, bits, step, least, given, n)) return true;
        }
      }
    return false;
  }

  template <int kCount>
  [[gnu::noinline]] static bool fits(const float* w, int bits, float step, float least, float* given,
                                     int32_t* n) {
    const Floats makers[] = {Floats{} + step, Floats{} + least};
    Ints wrong = {};
    for (int k = 0; k < kCount; k += kLanes) {
      const Floats weights = *reinterpret_cast<const Floats*>(w + k);
      const Ints number = step == 0 ? Ints{} : nearest((weights - makers[1]) / makers[0]);
      wrong |= (number < 0) | (number >= 1 << bits);
      wrong |= (Ints)made(number, makers, 1) != (Ints)weights;
      *reinterpret_cast<Ints*>(n + k) = number;
    }
    given[0] = step, given[1] = least;
    return !any(wrong);
  }

  // The number of fewest bits that is off from x by no more than `unsure`: a step or a least is a
  // float16 times 6 bits, and what is found of it was rounded.
  static float simplest(double x, double unsure) {
    const double size = std::abs(x);
    if (size <= unsure) return 0;
    const float ends[] = {static_cast<float>(size - unsure), static_cast<float>(size + unsure)};
    uint32_t from, to;
    std::memcpy(&from, ends, sizeof from);
    std::memcpy(&to, ends + 1, sizeof to);
    while ((to & (to - 1)) >= std::max(from, 1u)) to &= to - 1;
    float found;
    std::memcpy(&found, &to, sizeof found);
    return std::copysign(found, static_cast<float>(x));
  }

  // given: the step, and `apart` later the least.
  static Floats made(Ints n, const Floats* given, int apart = kVectors) {
    Floats sum;
    at::vec::fmadd(Lanes(given[0]), Lanes(__builtin_convertvector(n, Floats)), Lanes(given[apart]))
        .store(&sum);
    return sum;
  }
};

// Weights of one form, with numbers of so many bits and so many steps to a group.
//
// A word holds as many numbers as fit. Of 5 and 6 bits, they leave 2 bits in a word, and the last
// number or two of a part are cut into these.
template <class Form, int kBits, int kSteps = 1>
struct Whole {
  static constexpr int kPart = kBits == 5 ? 32 : kBits == 6 ? 16 : 32 / kBits;  // numbers
  static constexpr int kWords = kPart * kBits / 32;                             // of a part
  static constexpr int kInWord = 32 / kBits, kUncut = kWords * kInWord, kCut = kPart - kUncut;
  static constexpr int64_t kCount = kGroup / kSteps;  // numbers with one step
  static constexpr int64_t kHead = 4 * kSteps * Form::kGiven * kOutputs;
  static constexpr int64_t kBytes = kHead + kGroup / 8 * kBits * kOutputs;
  static_assert(kPart * kBits % 32 == 0 && kCount % kPart == 0);

  static bool fit(const float* w, uint8_t* group, int64_t output) {
    int32_t n[kGroup];
    float given[kSteps * Form::kGiven];
    for (int64_t s = 0; s < kSteps; ++s)
      if (!Form::template find<kCount>(w + s * kCount, kBits, given + s * Form::kGiven,
                                       n + s * kCount))
        return false;
    float* head = reinterpret_cast<float*>(group) + output;
    for (int64_t i = 0; i < kSteps * Form::kGiven; ++i) head[i * kOutputs] = given[i];
    uint32_t* to = reinterpret_cast<uint32_t*>(group + kHead) + output;
    for (int64_t k = 0; k < kGroup; k += kPart, to += kWords * kOutputs) put(n + k, to);
    return true;
  }

  [[gnu::noinline]] static void put(const int32_t* n, uint32_t* to) {
    uint32_t words[kWords] = {};
    for (int i = 0; i < kPart; ++i) {
      const uint32_t bits = static_cast<uint32_t>(n[i]) & ((1u << kBits) - 1);
      if (i < kUncut)
        words[i / kInWord] |= bits << (kBits * (i % kInWord));
      else
        for (int j = 0; j < kWords; ++j)
          words[j] |= (bits << (kBits * (i - kUncut)) >> (2 * j) & 3) << 30;
    }
    for (int j = 0; j < kWords; ++j) to[j * kOutputs] = words[j];
  }

  // The cut numbers of a part, in a word of their own.
  static Words joined(const Words* word, int vector) {
    Words all = {};
    for (int j = 0; j < kWords; ++j) all |= word[j * kVectors + vector] >> 30 << (2 * j);
    return all;
  }

  static Lanes widen(const uint8_t* group, int64_t k, Words word, int i, int vector) {
    const int at = kBits * i;
    const Ints n = Form::kSigned ? (Ints)(word << (32 - kBits - at)) >> (32 - kBits)
                                 : (Ints)((word >> at) & ((1u << kBits) - 1));
    const Floats* head = reinterpret_cast<const Floats*>(group);
    return Lanes(Form::made(n, head + k / kCount * Form::kGiven * kVectors + vector));
  }
};

// The upper half of a float32: bfloat16.
struct Halves {
  static constexpr int kInWord = 2, kWords = 1, kCut = 0;
  static constexpr int64_t kHead = 0, kBytes = 64 * kOutputs;

  static bool fit(const float* w, uint8_t* group, int64_t output) {
    uint32_t* to = reinterpret_cast<uint32_t*>(group) + output;
    for (int64_t k = 0; k < kGroup; k += kInWord) {
      uint32_t pair[2];
      std::memcpy(pair, w + k, sizeof pair);
      if ((pair[0] | pair[1]) & 0xFFFF) return false;
      to[k / kInWord * kOutputs] = pair[0] >> 16 | pair[1];
    }
    return true;
  }

  static Words joined(const Words*, int) { return Words{}; }

  static Lanes widen(const uint8_t*, int64_t, Words word, int i, int) {
    return Lanes((Floats)(i ? word & 0xFFFF0000u : word << 16));
  }
};

// Calls `use` with the number of an input of the groups, and its weights for a panel's outputs.
template <class Stored, class Use>
inline __attribute__((always_inline)) void each_input(const uint8_t* group, int64_t groups,
                                                      const Use& use) {
  for (int64_t g = 0; g < groups; ++g, group += Stored::kBytes) {
    const Words* word = reinterpret_cast<const Words*>(group + Stored::kHead);
    fetch(group + kAhead, Stored::kBytes);
    for (int64_t k = 0; k < kGroup; word += Stored::kWords * kVectors) {
      const int64_t begin = k;  // of a part
      const auto number = [&](const Words* in, int i) __attribute__((always_inline)) {
        Lanes weights[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) weights[v] = Stored::widen(group, begin, in[v], i, v);
        use(g * kGroup + k++, weights);
      };
      for (int j = 0; j < Stored::kWords; ++j)
#pragma GCC unroll 16
        for (int i = 0; i < Stored::kInWord; ++i) number(word + j * kVectors, i);
      if constexpr (Stored::kCut > 0) {
        Words cut[kVectors];
        for (int v = 0; v < kVectors; ++v) cut[v] = Stored::joined(word, v);
#pragma GCC unroll 2
        for (int i = 0; i < Stored::kCut; ++i) number(cut, i);
      }
    }
  }
}

template <class Stored>
void widen_groups(const uint8_t* group, int64_t groups, float* to) {
  each_input<Stored>(group, groups, [&](int64_t k, const Lanes* weights) {
    for (int v = 0; v < kVectors; ++v) weights[v].store(to + k * kOutputs + v * kLanes);
  });
}

// Sums of rows `stride` numbers apart, or none.
struct Place {
  float* at;
  int64_t stride;

  Place from(int64_t row, int64_t output) const {
    return {at ? at + row * stride + output : at, stride};
  }
};

// The sums of `kRows` rows and some of a panel's outputs, which go on from others, or begin at 0.
template <int kRows, int kWide>
struct Sums {
  Lanes of[kRows][kWide];

  explicit Sums(const Place& others) {
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kWide; ++v)
        of[r][v] = others.at ? Lanes::loadu(others.at + r * others.stride + v * kLanes) : Lanes(0.f);
  }

  // number(r): that of a row, to be multiplied with the weights.
  template <class Number>
  inline __attribute__((always_inline)) void add(const Number& number, const Lanes* weights) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Lanes one(number(r));
#pragma GCC unroll 4
      for (int v = 0; v < kWide; ++v) of[r][v] = at::vec::fmadd(one, weights[v], of[r][v]);
    }
  }

  // Stores them, added to those of the chains before if there are any.
  void end(const Place& before, const Place& to) const {
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kWide; ++v) {
        const int64_t at = r * before.stride + v * kLanes;
        (before.at ? Lanes::loadu(before.at + at) + of[r][v] : of[r][v])
            .store(to.at + r * to.stride + v * kLanes);
      }
  }
};

// Rows of `inputs` numbers, of which `count` are multiplied, with weights that were made before:
// [count, 32].
template <int kRows>
void multiply(const float* x, int64_t inputs, const float* w, int64_t count, const Place& from,
              const Place& before, const Place& to) {
  for (int64_t at = 0; at < kOutputs; at += kAtATime * kLanes) {
    Sums<kRows, kAtATime> sums(from.from(0, at));
    // A pointer to three rows: there are not enough registers for one to each.
    const float *a = x, *b = a + 3 * inputs, *c = b + 3 * inputs, *d = c + 3 * inputs;
    for (int64_t k = 0; k < count; ++k, ++a, ++b, ++c, ++d) {
      asm("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d));
      Lanes weights[kAtATime];
      for (int v = 0; v < kAtATime; ++v)
        weights[v] = Lanes::loadu(w + k * kOutputs + at + v * kLanes);
      const auto number = [&](int r) __attribute__((always_inline)) {
        return (r < 3 ? a : r < 6 ? b : r < 9 ? c : d)[r % 3 * inputs];
      };
      sums.add(number, weights);
    }
    sums.end(before.from(0, at), to.from(0, at));
  }
}

// Calls `use` with a number up to `kMost` as a constant.
template <int kMost, class Use>
void with_constant(int64_t number, const Use& use) {
  if (number == kMost) return use(std::integral_constant<int, kMost>());
  if constexpr (kMost > 1) with_constant<kMost - 1>(number, use);
}

// The same with weights as they are stored.
template <class Stored, int kRows>
void multiply_stored(const float* x, int64_t inputs, const uint8_t* group, int64_t groups,
                     const Place& before, const Place& to) {
  Sums<kRows, kVectors> sums({});
  each_input<Stored>(group, groups,
                     [&](int64_t k, const Lanes* weights) {
                       sums.add([&](int r) { return x[r * inputs + k]; }, weights);
                     });
  sums.end(before, to);
}

// What is done with weights that are stored in one way.
struct Kind {
  int64_t bytes;  // of a group
  bool (*fit)(const float* w, uint8_t* group, int64_t output);
  void (*widen)(const uint8_t* group, int64_t groups, float* to);
  decltype(&multiply_stored<Halves, 1>) multiply[kFewRows];
};

template <class Stored, int... kBefore>
constexpr Kind kind_of(std::integer_sequence<int, kBefore...>) {
  return {Stored::kBytes, Stored::fit, widen_groups<Stored>, {multiply_stored<Stored, 1 + kBefore>...}};
}

template <class Stored>
constexpr Kind kind_of() {
  return kind_of<Stored>(std::make_integer_sequence<int, kFewRows>());
}

// In the order in which they are tried, the narrowest first, with the quantizations of GGUF.
constexpr Kind kKinds[] = {
    kind_of<Whole<Product, 4>>(),     // Q4_0
    kind_of<Whole<Sum, 4>>(),         // Q4_1, Q4_K
    kind_of<Whole<Product, 5>>(),     // Q5_0
    kind_of<Whole<Product, 4, 2>>(),  // Q3_K
    kind_of<Whole<Sum, 5>>(),         // Q5_1, Q5_K
    kind_of<Whole<Product, 6, 2>>(),  // Q6_K
    kind_of<Whole<Product, 8>>(),     // Q8_0
    kind_of<Halves>(),
};

// Narrow weights: the number of their kind, their panels and their groups, in as many bytes as a
// line of the cache has, and then the groups.
struct Narrow {
  static constexpr int64_t kStart = 64;

  int64_t number, panels, groups;
  const Kind& kind() const { return kKinds[number]; }
  int64_t inputs() const { return groups * kGroup; }
  int64_t outputs() const { return panels * kOutputs; }
  int64_t bytes() const { return kStart + panels * groups * kind().bytes; }

  static Narrow of(const Tensor& stored) {
    Narrow narrow{-1, 0, 0};
    if (stored.is_contiguous() && stored.numel() >= kStart)
      std::memcpy(&narrow, stored.data_ptr(), sizeof narrow);
    const bool known = narrow.number >= 0 && narrow.number < std::size(kKinds);
    STD_TORCH_CHECK(known && stored.numel() == narrow.bytes(), "not narrow weights");
    return narrow;
  }
};

uint8_t* panels_of(const Tensor& stored) {
  return static_cast<uint8_t*>(stored.data_ptr()) + Narrow::kStart;
}

// Panels of weights, `bytes` apart.
struct Panels {
  const Kind& kind;
  const uint8_t* first;
  int64_t bytes, count;

  const uint8_t* at(int64_t panel, int64_t group) const {
    return first + panel * bytes + group * kind.bytes;
  }
};

// One chain of many rows, the products of groups [from, from + groups), of which each piece of weights
// is made once. The sums of pieces but the last are beside them.
void many_rows(const Panels& panels, int64_t from, int64_t groups, const float* x, int64_t rows,
               int64_t inputs, bool is_first, const Place& to, float* made) {
  const int64_t length = groups * kGroup, at_once = rows < kManyRows ? kAtOnce : kAtOnceOfMany;
  const Place next = {made + panels.count * at_once * kOutputs, panels.count * kOutputs};
  for (int64_t k = 0; k < length; k += at_once) {
    const int64_t count = std::min(at_once, length - k);
    const bool last = k + count == length;
    const Place begin = k ? next : Place{}, before = last && !is_first ? to : Place{};
    for (int64_t p = 0; p < panels.count; ++p)
      panels.kind.widen(panels.at(p, from + k / kGroup), count / kGroup, made + p * count * kOutputs);
    // kMostRows rows at once, or nearly as many: fewer would wait for each other's sums.
    int64_t row = 0;
    for (int64_t left = (rows + kMostRows - 1) / kMostRows; left > 0; --left)
      with_constant<kMostRows>((rows - row + left - 1) / left, [&](auto some) {
        for (int64_t p = 0; p < panels.count; ++p) {
          const int64_t output = p * kOutputs;
          multiply<some()>(x + row * inputs + k, inputs, made + p * count * kOutputs, count,
                           begin.from(row, output), before.from(row, output),
                           (last ? to : next).from(row, output));
        }
        row += some();
      });
  }
}

// The products of rows [rows, inputs] with the panels.
void multiply_panels(const Panels& panels, const float* x, int64_t rows, int64_t inputs,
                     int64_t chain, const Place& to) {
  float* made = room_for((kAtOnceOfMany + rows) * panels.count * kOutputs);
  for (int64_t k = 0; k < inputs; k += chain) {
    const int64_t groups = std::min(chain, inputs - k) / kGroup, from = k / kGroup;
    if (rows > kFewRows) {
      many_rows(panels, from, groups, x + k, rows, inputs, k == 0, to, made);
      continue;
    }
    for (int64_t p = 0; p < panels.count; ++p) {
      const Place sums = to.from(0, p * kOutputs);
      panels.kind.multiply[rows - 1](x + k, inputs, panels.at(p, from), groups, k ? sums : Place{},
                                     sums);
    }
  }
}

bool fit_all(const Kind& kind, const float* w, int64_t panels, int64_t groups, uint8_t* to) {
  std::atomic<bool> fits{true};
  in_parallel(panels, kOutputs * groups * kGroup, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * groups; i < end * groups && fits; ++i)
      for (int64_t n = 0; n < kOutputs && fits; ++n) {
        const float* from = w + ((i / groups * kOutputs + n) * groups + i % groups) * kGroup;
        if (!kind.fit(from, to + i * kind.bytes, n)) fits = false;
      }
  });
  return fits;
}

// The weights [outputs, inputs] in the narrowest kind that loses nothing. Empty if there is none.
Tensor narrow(const Tensor& weight) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "not a contiguous matrix");
  Narrow narrow{0, weight.size(0) / kOutputs, weight.size(1) / kGroup};
  const float* from = read(weight);
  if (narrow.outputs() == weight.size(0) && narrow.inputs() == weight.size(1))
    for (; narrow.number < std::size(kKinds); ++narrow.number) {
      Tensor stored = empty({narrow.bytes()}, aoti_torch_dtype_uint8());
      std::memset(stored.data_ptr(), 0, Narrow::kStart);
      std::memcpy(stored.data_ptr(), &narrow, sizeof narrow);
      if (fit_all(narrow.kind(), from, narrow.panels, narrow.groups, panels_of(stored)))
        return stored;
    }
  return empty({0}, aoti_torch_dtype_uint8());
}

// The weights [outputs, inputs] of which the narrow ones were made.
Tensor widen(const Tensor& stored) {
  const Narrow narrow = Narrow::of(stored);
  const int64_t inputs = narrow.inputs(), panel_bytes = narrow.groups * narrow.kind().bytes;
  Tensor output = empty({narrow.outputs(), inputs});
  float* to = write(output);
  const uint8_t* from = panels_of(stored);
  in_parallel(narrow.panels, kOutputs * inputs, [&](int64_t begin, int64_t end) {
    float* made = room_for(inputs * kOutputs);
    for (int64_t panel = begin; panel < end; ++panel) {
      narrow.kind().widen(from + panel * panel_bytes, narrow.groups, made);
      for (int64_t n = 0; n < kOutputs; ++n)
        for (int64_t k = 0; k < inputs; ++k)
          to[(panel * kOutputs + n) * inputs + k] = made[k * kOutputs + n];
    }
  });
  return output;
}

// Rows [..., inputs] times narrow weights, plus a bias [outputs]. chain: inputs whose products are one.
Tensor linear(const Tensor& x, const Tensor& stored, const std::optional<Tensor>& bias,
              int64_t chain) {
  STD_TORCH_CHECK(chain > 0 && chain % kGroup == 0, "a chain of another length");
  const Narrow narrow = Narrow::of(stored);
  const int64_t inputs = narrow.inputs(), outputs = narrow.outputs();
  const int64_t panel_bytes = narrow.groups * narrow.kind().bytes;
  STD_TORCH_CHECK(x.is_contiguous() && x.size(x.dim() - 1) == inputs, "rows of another size");
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = outputs;
  Tensor output = empty(sizes);
  const int64_t rows = x.numel() / inputs;
  int64_t pieces = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  const int64_t tasks = 4 * static_cast<int64_t>(torch::stable::get_num_threads());
  while (narrow.panels * pieces < tasks && rows > kRowsAtLeast * pieces) ++pieces;
  const int64_t at_once = pieces ? (rows + pieces - 1) / pieces : 0;
  const float *from = read(x), *added = bias ? read(*bias) : nullptr;
  const uint8_t* weights = panels_of(stored);
  float* to = write(output);
  in_parallel(narrow.panels * pieces, inputs * (at_once + 4), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin, next; item < end; item = next) {
      const int64_t panel = item % narrow.panels, row = item / narrow.panels * at_once;
      const int64_t count = std::min(at_once, rows - row);
      const int64_t most = std::min(count < kManyRows ? 1 : kPanelsAtOnce, end - item);
      const Panels panels = {narrow.kind(), weights + panel * panel_bytes, panel_bytes,
                             std::min(most, narrow.panels - panel)};
      next = item + panels.count;
      float* sums = to + row * outputs + panel * kOutputs;
      multiply_panels(panels, from + row * inputs, count, inputs, chain, {sums, outputs});
      for (int64_t r = 0; added && r < count; ++r)
        for (int64_t n = 0; n < panels.count * kOutputs; ++n)
          sums[r * outputs + n] += added[panel * kOutputs + n];
    }
  });
  return output;
}

}  // namespace
