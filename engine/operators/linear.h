// Linear layers whose weights are stored in fewer bits than float32 has, without a loss.
//
// Many checkpoints are published in bfloat16 or quantized, and a float32 that was made of 4, 8 or 16
// bits is made of them again as it is needed. A token's products wait for weights from memory, so
// they are faster by what is not read.
//
// Bits are those of oneDNN's products (brgemm): per output, the products of so many numbers at a time,
// 1,024 with AVX2, are one chain of multiply-adds that begins at 0, and the chains are added in order.
// Which rows and threads there are does not matter. `engine.models.packing` finds the length of the
// chains, and compares the bits of each shape before it uses it.
//
// Layout: 32 outputs make a panel and 32 inputs a group, so weights are [outputs / 32, inputs / 32,
// bytes of a group]. The bytes tell the kind. In a group, the inputs that share a word of 32 bits stand
// together, and each word is followed by those of the other outputs.

#pragma once

#include "tensors.h"

#include <immintrin.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <optional>

namespace {

constexpr int64_t kOutputs = 32, kGroup = 32;
constexpr int64_t kAtOnce = 128;     // inputs whose weights many rows share in the nearest cache
constexpr int64_t kRowsAtOnce = 96;  // rows of a piece of work
constexpr int kVectors = kOutputs / kLanes;
constexpr int kMostRows = kLanes == 16 ? 12 : 6;  // whose sums the registers hold,
constexpr int kAtATime = 2;                       // of so many vectors of outputs
constexpr int kFewRows = 3;  // for so many, weights go from memory into registers

typedef uint32_t Words __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4)));

float as_half(float x) { return _cvtsh_ss(_cvtss_sh(x, 0)); }

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

// The kinds. `fit` writes the 32 weights of an output into a group, if they can be had again.
// `widen` makes a vector of the weights of input `i` of a word.

// step * n + least, n of 4 bits: GGUF's Q4_1. Not its Q4_0, where steps are negative and so zeros are -0.
struct Fours {
  static constexpr int kInWord = 8;
  static constexpr int64_t kHead = 8 * kOutputs, kBytes = kHead + 16 * kOutputs;

  static bool fit(const float* w, uint8_t* group, int64_t output) {
    const auto [low, high] = std::minmax_element(w, w + kGroup);
    for (int span = 15; span > 0; --span) {
      const float step = as_half((*high - *low) / static_cast<float>(span));
      for (int first = 0; first + span <= 15; ++first) {
        const float least = first ? as_half(*low - step * static_cast<float>(first)) : *low;
        if (fit(w, step, least, group, output)) return true;
      }
      if (step == 0) return false;
    }
    return false;
  }

  static bool fit(const float* w, float step, float least, uint8_t* group, int64_t output) {
    uint32_t words[kGroup / kInWord] = {};
    for (int64_t k = 0; k < kGroup; ++k) {
      const float n = step == 0 ? 0 : std::round((w[k] - least) / step);
      if (!(n >= 0 && n <= 15) || !same_bits(std::fma(step, n, least), w[k])) return false;
      words[k / kInWord] |= static_cast<uint32_t>(n) << (4 * (k % kInWord));
    }
    float* head = reinterpret_cast<float*>(group);
    head[output] = step;
    head[kOutputs + output] = least;
    uint32_t* to = reinterpret_cast<uint32_t*>(group + kHead) + output;
    for (int64_t i = 0; i < kGroup / kInWord; ++i) to[i * kOutputs] = words[i];
    return true;
  }

  static Lanes widen(const uint8_t* group, Words word, int i, int vector) {
    const Floats* head = reinterpret_cast<const Floats*>(group);
    const Floats n = __builtin_convertvector((Ints)((word >> (4 * i)) & 15), Floats);
    return at::vec::fmadd(Lanes(head[vector]), Lanes(n), Lanes(head[kVectors + vector]));
  }
};

// step * n, n of 8 bits: GGUF's Q8_0.
struct Eights {
  static constexpr int kInWord = 4;
  static constexpr int64_t kHead = 4 * kOutputs, kBytes = kHead + 32 * kOutputs;

  static bool fit(const float* w, uint8_t* group, int64_t output) {
    float most = 0;
    for (int64_t k = 0; k < kGroup; ++k) most = std::max(most, std::abs(w[k]));
    for (const int largest : {127, 128})
      if (fit(w, as_half(most / static_cast<float>(largest)), group, output)) return true;
    return false;
  }

  static bool fit(const float* w, float step, uint8_t* group, int64_t output) {
    uint32_t words[kGroup / kInWord] = {};
    for (int64_t k = 0; k < kGroup; ++k) {
      const float n = step == 0 ? 0 : std::round(w[k] / step);
      if (!(n >= -128 && n <= 127)) return false;
      const int32_t whole = static_cast<int32_t>(n);  // it has no -0
      if (!same_bits(step * static_cast<float>(whole), w[k])) return false;
      words[k / kInWord] |= (static_cast<uint32_t>(whole) & 0xFF) << (8 * (k % kInWord));
    }
    reinterpret_cast<float*>(group)[output] = step;
    uint32_t* to = reinterpret_cast<uint32_t*>(group + kHead) + output;
    for (int64_t i = 0; i < kGroup / kInWord; ++i) to[i * kOutputs] = words[i];
    return true;
  }

  static Lanes widen(const uint8_t* group, Words word, int i, int vector) {
    const Ints n = (Ints)(word << (24 - 8 * i)) >> 24;
    return Lanes(reinterpret_cast<const Floats*>(group)[vector] * __builtin_convertvector(n, Floats));
  }
};

// The upper half of a float32: bfloat16.
struct Halves {
  static constexpr int kInWord = 2;
  static constexpr int64_t kHead = 0, kBytes = 64 * kOutputs;

  static bool fit(const float* w, uint8_t* group, int64_t output) {
    uint32_t* to = reinterpret_cast<uint32_t*>(group) + output;
    for (int64_t k = 0; k < kGroup; k += 2) {
      uint32_t pair[2];
      std::memcpy(pair, w + k, sizeof pair);
      if ((pair[0] | pair[1]) & 0xFFFF) return false;
      to[k / kInWord * kOutputs] = pair[0] >> 16 | pair[1];
    }
    return true;
  }

  static Lanes widen(const uint8_t*, Words word, int i, int) {
    return Lanes((Floats)(i ? word & 0xFFFF0000u : word << 16));
  }
};

// Calls `use` with the number of an input of the groups, and its weights for a panel's outputs.
template <class Kind, class Use>
inline __attribute__((always_inline)) void each_input(const uint8_t* group, int64_t groups,
                                                      const Use& use) {
  for (int64_t g = 0; g < groups; ++g, group += Kind::kBytes) {
    const Words* word = reinterpret_cast<const Words*>(group + Kind::kHead);
    for (int64_t k = 0; k < kGroup; k += Kind::kInWord, word += kVectors) {
#pragma GCC unroll 8
      for (int i = 0; i < Kind::kInWord; ++i) {
        Lanes weights[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) weights[v] = Kind::widen(group, word[v], i, v);
        use(g * kGroup + k + i, weights);
      }
    }
  }
}

template <class Kind>
void widen_groups(const uint8_t* group, int64_t groups, float* to) {
  each_input<Kind>(group, groups, [&](int64_t k, const Lanes* weights) {
    for (int v = 0; v < kVectors; ++v) weights[v].store(to + k * kOutputs + v * kLanes);
  });
}

// The sums of `kRows` rows and some of a panel's outputs, which go on from `to` unless they are fresh.
template <int kRows, int kWide>
struct Sums {
  Lanes of[kRows][kWide];

  void begin(bool fresh, const float* from, int64_t stride) {
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kWide; ++v)
        of[r][v] = fresh ? Lanes(0.f) : Lanes::loadu(from + r * stride + v * kLanes);
  }

  inline __attribute__((always_inline)) void add(const float* x, int64_t stride, const Lanes* weights) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Lanes one(x[r * stride]);
#pragma GCC unroll 4
      for (int v = 0; v < kWide; ++v) of[r][v] = at::vec::fmadd(one, weights[v], of[r][v]);
    }
  }

  void end(float* to, int64_t stride) const {
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kWide; ++v) of[r][v].store(to + r * stride + v * kLanes);
  }
};

// Rows of `inputs` numbers, with weights that were made before: [inputs, 32].
template <int kRows>
void multiply(const float* x, int64_t inputs, const float* w, int64_t count, float* to,
              int64_t stride, bool fresh) {
  for (int64_t at = 0; at < kOutputs; at += kAtATime * kLanes) {
    Sums<kRows, kAtATime> sums;
    sums.begin(fresh, to + at, stride);
    for (int64_t k = 0; k < count; ++k) {
      Lanes weights[kAtATime];
      for (int v = 0; v < kAtATime; ++v)
        weights[v] = Lanes::loadu(w + k * kOutputs + at + v * kLanes);
      sums.add(x + k, inputs, weights);
    }
    sums.end(to + at, stride);
  }
}

// Calls `use` with a number up to `kMost` as a constant.
template <int kMost, class Use>
void with_constant(int64_t number, const Use& use) {
  if (number == kMost) return use(std::integral_constant<int, kMost>());
  if constexpr (kMost > 1) with_constant<kMost - 1>(number, use);
}

// The same with weights as they are stored.
template <class Kind, int kRows>
void multiply_stored(const float* x, int64_t inputs, const uint8_t* group, int64_t groups, float* to,
                     int64_t stride) {
  Sums<kRows, kVectors> sums;
  sums.begin(true, to, stride);
  each_input<Kind>(group, groups,
                   [&](int64_t k, const Lanes* weights) { sums.add(x + k, inputs, weights); });
  sums.end(to, stride);
}

// One chain of a few rows.
template <class Kind>
void few_rows(const float* x, int64_t rows, int64_t inputs, const uint8_t* group, int64_t groups,
              float* to, int64_t stride) {
  if (rows == 1) multiply_stored<Kind, 1>(x, inputs, group, groups, to, stride);
  if (rows == 2) multiply_stored<Kind, 2>(x, inputs, group, groups, to, stride);
  if (rows == 3) multiply_stored<Kind, 3>(x, inputs, group, groups, to, stride);
}

// One chain of many rows, of which each piece of weights is made once.
template <class Kind>
void many_rows(const float* x, int64_t rows, int64_t inputs, const uint8_t* group, int64_t groups,
               float* to, int64_t stride, float* made) {
  for (int64_t k = 0; k < groups * kGroup; k += kAtOnce) {
    const int64_t count = std::min(kAtOnce, groups * kGroup - k);
    const uint8_t* from = group + k / kGroup * Kind::kBytes;
    widen_groups<Kind>(from, count / kGroup, made);
    // kMostRows rows at once, or nearly as many: fewer would wait for each other's sums.
    int64_t row = 0;
    for (int64_t left = (rows + kMostRows - 1) / kMostRows; left > 0; --left)
      with_constant<kMostRows>((rows - row + left - 1) / left, [&](auto some) {
        multiply<some()>(x + row * inputs + k, inputs, made, count, to + row * stride, stride, k == 0);
        row += some();
      });
  }
}

// The products of rows [rows, inputs] with one panel, into `to`, with rows `stride` numbers apart.
template <class Kind>
void panel_of(const float* x, int64_t rows, int64_t inputs, int64_t chain, const uint8_t* group,
              float* to, int64_t stride) {
  float* made = room_for((kAtOnce + rows) * kOutputs);
  float* next = made + kAtOnce * kOutputs;
  for (int64_t k = 0; k < inputs; k += chain) {
    const int64_t groups = std::min(chain, inputs - k) / kGroup;
    float* sums = k ? next : to;
    const int64_t apart = k ? kOutputs : stride;
    if (rows <= kFewRows)
      few_rows<Kind>(x + k, rows, inputs, group, groups, sums, apart);
    else
      many_rows<Kind>(x + k, rows, inputs, group, groups, sums, apart, made);
    group += groups * Kind::kBytes;
    for (int64_t i = 0; k && i < rows * kOutputs; ++i)
      to[i / kOutputs * stride + i % kOutputs] += next[i];
  }
}

// Calls `use` with an object of the kind of these weights.
template <class Use>
auto with_kind(const Tensor& narrow, const Use& use) {
  STD_TORCH_CHECK(narrow.dim() == 3 && narrow.is_contiguous(), "not narrow weights");
  const int64_t bytes = narrow.size(2);
  if (bytes == Fours::kBytes) return use(Fours());
  if (bytes == Eights::kBytes) return use(Eights());
  STD_TORCH_CHECK(bytes == Halves::kBytes, "not narrow weights");
  return use(Halves());
}

template <class Kind>
bool fit_all(const float* w, int64_t panels, int64_t groups, uint8_t* to) {
  std::atomic<bool> fits{true};
  in_parallel(panels, kOutputs * groups * kGroup, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * groups; i < end * groups && fits; ++i)
      for (int64_t n = 0; n < kOutputs; ++n) {
        const float* from = w + ((i / groups * kOutputs + n) * groups + i % groups) * kGroup;
        if (!Kind::fit(from, to + i * Kind::kBytes, n)) fits = false;
      }
  });
  return fits;
}

// The weights [outputs, inputs] in the narrowest kind that loses nothing. Empty if there is none.
Tensor narrow(const Tensor& weight) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "not a contiguous matrix");
  const int64_t panels = weight.size(0) / kOutputs, groups = weight.size(1) / kGroup;
  const float* from = read(weight);
  if (panels * kOutputs == weight.size(0) && groups * kGroup == weight.size(1)) {
    Tensor found = empty({0}, aoti_torch_dtype_uint8());
    const auto fits = [&]<class Kind>(Kind) {
      found = empty({panels, groups, Kind::kBytes}, aoti_torch_dtype_uint8());
      return fit_all<Kind>(from, panels, groups, static_cast<uint8_t*>(found.data_ptr()));
    };
    if (fits(Fours()) || fits(Eights()) || fits(Halves())) return found;
  }
  return empty({0}, aoti_torch_dtype_uint8());
}

// The weights [outputs, inputs] of which the narrow ones were made.
Tensor widen(const Tensor& narrow) {
  const int64_t panels = narrow.size(0), groups = narrow.size(1), inputs = groups * kGroup;
  Tensor output = empty({panels * kOutputs, inputs});
  float* to = write(output);
  const uint8_t* from = static_cast<const uint8_t*>(narrow.data_ptr());
  with_kind(narrow, [&]<class Kind>(Kind) {
    in_parallel(panels, kOutputs * inputs, [&](int64_t begin, int64_t end) {
      float* made = room_for(inputs * kOutputs);
      for (int64_t panel = begin; panel < end; ++panel) {
        widen_groups<Kind>(from + panel * groups * Kind::kBytes, groups, made);
        for (int64_t n = 0; n < kOutputs; ++n)
          for (int64_t k = 0; k < inputs; ++k)
            to[(panel * kOutputs + n) * inputs + k] = made[k * kOutputs + n];
      }
    });
  });
  return output;
}

// Rows [..., inputs] times narrow weights, plus a bias [outputs]. chain: inputs whose products are one.
Tensor linear(const Tensor& x, const Tensor& narrow, const std::optional<Tensor>& bias,
              int64_t chain) {
  STD_TORCH_CHECK(chain > 0 && chain % kGroup == 0, "a chain of another length");
  const int64_t groups = narrow.size(1), inputs = groups * kGroup, outputs = narrow.size(0) * kOutputs;
  STD_TORCH_CHECK(x.is_contiguous() && x.size(x.dim() - 1) == inputs, "rows of another size");
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = outputs;
  Tensor output = empty(sizes);
  const int64_t rows = x.numel() / inputs, at_once = rows < 2 * kRowsAtOnce ? std::max<int64_t>(1, rows) : kRowsAtOnce;
  const int64_t pieces = (rows + at_once - 1) / at_once;
  const float *from = read(x), *added = bias ? read(*bias) : nullptr;
  const uint8_t* weights = static_cast<const uint8_t*>(narrow.data_ptr());
  float* to = write(output);
  with_kind(narrow, [&]<class Kind>(Kind) {
    in_parallel(narrow.size(0) * pieces, inputs * (at_once + 4) / 4, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t panel = item / pieces, row = item % pieces * at_once;
        const int64_t count = std::min(at_once, rows - row);
        float* sums = to + row * outputs + panel * kOutputs;
        panel_of<Kind>(from + row * inputs, count, inputs, chain, weights + panel * groups * Kind::kBytes, sums,
                       outputs);
        for (int64_t i = 0; added && i < count * kOutputs; ++i)
          sums[i / kOutputs * outputs + i % kOutputs] += added[panel * kOutputs + i % kOutputs];
      }
    });
  });
  return output;
}

}  // namespace
