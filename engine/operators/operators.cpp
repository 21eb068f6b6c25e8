// Operators that a recorded forward calls in place of several of torch's (engine.operators).
//
// Each computes the bits of the calls that it replaces: the same vector functions, from torch's own
// headers, and sums in the same order. The order stands beside each sum. A start compares the bits
// before it uses them, so a torch that sums in another order costs speed and changes no answer.
// Compile without contraction: a product and a sum are one operation only where fmadd says so.
//
// All tensors are float32 on a CPU. Threads are those of torch's own team. No Python here.

#include "exponential.h"
#include "linear.h"
#include "tensors.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <immintrin.h>
#include <limits>
#include <optional>
#include <vector>

namespace {

constexpr int64_t kNumbersAhead = kAhead / sizeof(float);
constexpr int64_t kAligned = 16;   // keys: a softmax begins and ends at a multiple
constexpr int64_t kPiece = 192;    // keys whose values are added in one chain
constexpr int64_t kShared = 4 * kPiece;  // keys from which threads share those of a head,
constexpr int64_t kSharedScores = 1 << 22;  // if all heads' scores are not more numbers
constexpr int64_t kRows = 6;       // rows that share one reading of values
constexpr int kWide = kLanes == 16 ? 4 : 2;        // vectors of a value that they add up at once
constexpr int64_t kTileRows = 48;                  // rows whose scores are in memory at once,
constexpr int64_t kScores = kLanes == 16 ? 1 << 19 : 3 << 15;  // if these are not more numbers

// Norms.

// The sum of squares of `width` numbers in the order of torch's sum over the last dimension: four
// chains of vectors of 8, on any processor, folded into coarser ones after every 2^power steps
// (aten/src/ATen/native/cpu/SumKernel.cpp, multi_row_sum).
float sum_of_squares(const float* row, int64_t width) {
  constexpr int64_t kChains = 4, kLevels = 4, kWide = 8;
  const int64_t vectors = width / kWide, steps = vectors / kChains;
  int64_t log = 0;
  while ((int64_t{1} << log) < steps) ++log;
  const int64_t power = std::max<int64_t>(4, log / kLevels);
  const int64_t step = int64_t{1} << power, mask = step - 1;
  float sums[kLevels][kChains * kWide] = {};
  const auto add = [&](int64_t at, int64_t count, float* sum) {
    const float* x = row + at * kWide;
    for (int64_t k = 0; k < count * kWide; ++k) sum[k] += x[k] * x[k];
  };
  int64_t i = 0;
  while (i + step <= steps) {
    for (int64_t j = 0; j < step; ++j, ++i) add(i * kChains, kChains, sums[0]);
    for (int64_t level = 1; level < kLevels; ++level) {
      for (int64_t k = 0; k < kChains * kWide; ++k) {
        sums[level][k] += sums[level - 1][k];
        sums[level - 1][k] = 0;
      }
      if (i & (mask << (level * power))) break;
    }
  }
  for (; i < steps; ++i) add(i * kChains, kChains, sums[0]);
  for (int64_t level = 1; level < kLevels; ++level)
    for (int64_t k = 0; k < kChains * kWide; ++k) sums[0][k] += sums[level][k];
  for (int64_t at = steps * kChains; at < vectors; ++at) add(at, 1, sums[0]);
  for (int64_t chain = 1; chain < kChains; ++chain)
    for (int64_t k = 0; k < kWide; ++k) sums[0][k] += sums[0][chain * kWide + k];
  float total = 0;
  for (int64_t at = vectors * kWide; at < width; ++at) total += row[at] * row[at];
  for (int64_t k = 0; k < kWide; ++k) total += sums[0][k];
  return total;
}

// x / sqrt(mean(x^2) + eps) over the last dimension. x: rows that may lie apart; what heads [1, H, T, D]
// give lies in memory as they do. eps: one float64, as a recorder keeps a number.
Tensor norm(const Tensor& x, const Tensor& eps) {
  if (x.dim() == 4 && x.stride(1) < x.stride(2))
    return torch::stable::transpose(norm(torch::stable::transpose(x, 1, 2), eps), 1, 2);
  STD_TORCH_CHECK(eps.scalar_type() == torch::headeronly::ScalarType::Double && eps.numel() == 1,
                  "eps is not one float64");
  Tensor output = empty(sizes_of(x));
  const int64_t width = x.size(x.dim() - 1), rows = x.numel() / std::max<int64_t>(1, width);
  const float added = static_cast<float>(*static_cast<const double*>(eps.data_ptr()));
  const Rows from(x);
  float* to = write(output);
  in_parallel(rows, width, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* row = from[i];
      const float mean = sum_of_squares(row, width) / static_cast<float>(width);
      const float scale = 1.f / std::sqrt(mean + added);
      for (int64_t j = 0; j < width; ++j) to[i * width + j] = row[j] * scale;
    }
  });
  return output;
}

// Gates.

// activate(gate) * up, by a function of vectors. Their rows may lie apart.
template <class Activate>
Tensor activated(const Tensor& gate, const Tensor& up, const Activate& activate) {
  STD_TORCH_CHECK(sizes_of(gate) == sizes_of(up), "other sizes");
  Tensor output = empty(sizes_of(gate));
  const Rows gates(gate), factors(up);
  float* to = write(output);
  const auto some = [&](const float* g, const float* u, int64_t at, int64_t count) {
    at::vec::map2([&](Lanes x, Lanes y) { return activate(x) * y; }, to + at, g, u, count);
  };
  if (gate.is_contiguous() && up.is_contiguous()) {
    in_parallel(gate.numel() / kLanes + 1, 8 * kLanes, [&](int64_t begin, int64_t end) {
      const int64_t at = begin * kLanes, stop = std::min(end * kLanes, gate.numel());
      some(gates[0] + at, factors[0] + at, at, stop - at);
    });
    return output;
  }
  const int64_t width = gate.size(gate.dim() - 1);
  in_parallel(gate.numel() / std::max<int64_t>(1, width), 8 * width, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) some(gates[i], factors[i], i * width, width);
  });
  return output;
}

Tensor silu_mul(const Tensor& gate, const Tensor& up) {
  return activated(gate, up, [](Lanes x) { return x / (Lanes(1.f) + exponential(x.neg())); });
}

// GELU approximated by tanh (aten/src/ATen/native/cpu/Gelu.h, whose first sum torch's compiler makes one
// multiply-add).
Tensor gelu_mul(const Tensor& gate, const Tensor& up) {
  constexpr float kBeta = M_SQRT2 * M_2_SQRTPI * 0.5, kKappa = 0.044715;
  return activated(gate, up, [](Lanes x) {
    const Lanes inner = Lanes(kBeta) * at::vec::fmadd(Lanes(kKappa), x * x * x, x);
    return Lanes(.5f) * x * (Lanes(1.f) + inner.tanh());
  });
}

// The rotation of positions, as most models define it: x * cos + half(x) * sin, where half(x) is
// the second half of x, negated, and then the first. x: [1, H, T, D], any strides but D's; cos,
// sin: T * D numbers. Returns [1, H, T, D], stored as [1, T, H, D].
Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  STD_TORCH_CHECK(x.dim() == 4, "not heads");
  const int64_t heads = x.size(1), tokens = x.size(2), dim = x.size(3), half = dim / 2;
  STD_TORCH_CHECK(x.size(0) == 1 && x.stride(3) == 1 && dim % 2 == 0, "not heads of one sequence");
  STD_TORCH_CHECK(cos.is_contiguous() && sin.is_contiguous(), "not contiguous");
  STD_TORCH_CHECK(cos.numel() == tokens * dim && sin.numel() == tokens * dim, "another width");
  Tensor output = empty({1, tokens, heads, dim});
  const float *from = read(x), *c = read(cos), *s = read(sin);
  float* to = write(output);
  in_parallel(tokens, heads * dim * 2, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < heads; ++h) {
        const float* row = from + h * x.stride(1) + t * x.stride(2);
        const float *ct = c + t * dim, *st = s + t * dim;
        float* out = to + (t * heads + h) * dim;
        for (int64_t i = 0; i < half; ++i) out[i] = row[i] * ct[i] + -row[half + i] * st[i];
        for (int64_t i = half; i < dim; ++i) out[i] = row[i] * ct[i] + row[i - half] * st[i];
      }
  });
  return torch::stable::transpose(output, 1, 2);
}

// Attention.
//
// A tile is some tokens' rows of one head. A vector holds one number of kLanes rows, so that keys and
// values are read as they lie: queries are [vectors, dim, kLanes], scores [vectors, keys, kLanes].

// One head's keys and values of a sequence, [capacity, dim], and the keys [low, end) that a tile of
// tokens sees, the first all but the last `hidden` of them, each `reach` at most. `groups` rows are a
// token's.
struct Head {
  const float *keys, *values;
  int64_t dim, low, end, hidden, groups, reach;
};

// Scores of K keys for C vectors of rows. Each is one chain of multiply-adds over the head's numbers,
// as in MKL's matrix products of up to kPiece, and oneDNN's of up to 512.
template <int K, int C>
void score(const float* keys, const float* queries, int64_t dim, float* scores, int64_t plane) {
  Lanes sums[K][C];
#pragma GCC unroll 8
  for (int k = 0; k < K; ++k)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sums[k][c] = Lanes(0.f);
  for (int64_t d = 0; d < dim; ++d) {
    Lanes rows[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) rows[c] = Lanes::loadu(queries + (c * dim + d) * kLanes);
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) {
      const Lanes key(keys[k * dim + d]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sums[k][c] = at::vec::fmadd(rows[c], key, sums[k][c]);
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < K; ++k)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sums[k][c].store(scores + c * plane + k * kLanes);
}

// Scores of keys [0, count), a multiple of kAligned, in planes of count * kLanes.
void score_all(const float* keys, const float* queries, int64_t vectors, int64_t dim, int64_t count,
               float* scores) {
  constexpr int kKeys = kLanes == 16 ? 8 : 4, kTogether = 3;  // as many sums as registers hold
  const int64_t plane = count * kLanes;
  for (int64_t first = 0; first < count; first += kAligned)
    for (int64_t v = 0; v < vectors; v += kTogether)
      with_constant<kTogether>(std::min<int64_t>(kTogether, vectors - v), [&](auto C) {
        constexpr int K = C() == 1 ? 8 : kKeys;
        for (int64_t j = first; j < first + kAligned; j += K) {
          if (v == 0) fetch(keys + j * dim + kNumbersAhead, 4 * K * dim);
          score<K, C()>(keys + j * dim, queries + v * dim * kLanes, dim,
                        scores + v * plane + j * kLanes, plane);
        }
      });
}

// exp(score - the most of its row) in place. Returns what to multiply a row's by, so that they add up
// to 1. As torch's softmax over the last dimension (aten/src/ATen/native/cpu/SoftMaxKernel.cpp),
// which adds up kLanes chains of keys, and then their sums by halves. A score that is not a number makes
// its row so by its exponential.
Lanes softmax(float* scores, int64_t count) {
  constexpr int64_t kChains = 4;  // as each waits for what it compared last
  Lanes chains[kChains], sums[kLanes];
  for (int64_t i = 0; i < kChains; ++i) chains[i] = Lanes::loadu(scores + i * kLanes);
  for (int64_t j = kChains; j < count; j += kChains)
    for (int64_t i = 0; i < kChains; ++i)
      chains[i] = at::vec::clamp_min(Lanes::loadu(scores + (j + i) * kLanes), chains[i]);
  for (int64_t i = 1; i < kChains; ++i) chains[0] = at::vec::clamp_min(chains[i], chains[0]);
  const Lanes most = chains[0];
  for (int64_t j = 0; j < count; j += kLanes)
    for (int64_t i = 0; i < kLanes; ++i) {
      float* at = scores + (j + i) * kLanes;
      const Lanes weight = exponential(Lanes::loadu(at) - most);
      weight.store(at);
      sums[i] = j == 0 ? weight : sums[i] + weight;
    }
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
  return Lanes(1.f) / sums[0];
}

// output[r] += weights[r] @ values for R rows and C vectors of each, one chain over `count` keys.
template <int R, int C>
void weigh(const float* weights, const float* values, int64_t dim, int64_t count, bool is_first,
           float* output) {
  Lanes sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sums[r][c] = Lanes(0.f);
  for (int64_t j = 0; j < count; ++j) {
    Lanes numbers[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) numbers[c] = Lanes::loadu(values + j * dim + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Lanes weight(weights[j * kLanes + r]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sums[r][c] = at::vec::fmadd(weight, numbers[c], sums[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      float* to = output + r * dim + c * kLanes;
      (is_first ? sums[r][c] : Lanes::loadu(to) + sums[r][c]).store(to);
    }
}

// The same for `rows` rows, kRows or nearly as many at once, and the numbers of a head from `at` on
// that whole C vectors hold. Returns where they end.
template <int C>
int64_t weigh_rows(const float* weights, const float* values, int64_t dim, int64_t at, int64_t count,
                   bool is_first, int64_t rows, float* output) {
  for (; at + C * kLanes <= dim; at += C * kLanes)
    for (int64_t r = 0, groups = (rows + kRows - 1) / kRows; groups > 0; --groups) {
      const int64_t size = (rows - r + groups - 1) / groups;
      with_constant<kRows>(size, [&](auto R) {
        weigh<R(), C>(weights + r, values + at, dim, count, is_first, output + r * dim + at);
      });
      r += size;
    }
  return at;
}

// Makes scores of keys [base, base + count), in a plane of the rows from `first` on, their weights but
// for what is returned: what to multiply a row's by.
Lanes weights_of(const Head& head, int64_t first, int64_t base, int64_t count, float* plane) {
  constexpr float kUnseen = -std::numeric_limits<float>::infinity();
  for (int64_t r = 0; r < kLanes; ++r) {
    const int64_t end = std::min(head.end, head.end - head.hidden + (first + r) / head.groups);
    const int64_t low = std::max(head.low, end - head.reach);
    for (int64_t j = 0; j < low - base; ++j) plane[j * kLanes + r] = kUnseen;
    for (int64_t j = end - base; j < count; ++j) plane[j * kLanes + r] = kUnseen;
  }
  return softmax(plane, count);
}

// output[r] += weights[r] * scale @ values of keys [start, until), one chain, for `rows` rows of a plane.
void weigh_piece(const Head& head, int64_t start, int64_t until, Lanes scale, float* weights,
                 int64_t rows, bool is_first, float* output) {
  const int64_t count = until - start, dim = head.dim;
  const float* values = head.values + start * dim;
  for (int64_t j = 0; j < count; ++j)
    (Lanes::loadu(weights + j * kLanes) * scale).store(weights + j * kLanes);
  const int64_t at = weigh_rows<kWide>(weights, values, dim, 0, count, is_first, rows, output);
  weigh_rows<1>(weights, values, dim, at, count, is_first, rows, output);
}

int64_t aligned(int64_t key) { return key - key % kAligned; }

// A tile of `rows` rows. queries: [vectors, dim, kLanes]; scores: room for [vectors, keys, kLanes];
// output: [rows, dim].
void attend_tile(const Head& head, const float* queries, int64_t rows, float* scores, float* output) {
  const int64_t base = aligned(head.low), dim = head.dim;
  const int64_t count = aligned(head.end + kAligned - 1) - base;
  const int64_t vectors = (rows + kLanes - 1) / kLanes;
  score_all(head.keys + base * dim, queries, vectors, dim, count, scores);
  for (int64_t v = 0; v < vectors; ++v) {
    float* plane = scores + v * count * kLanes;
    const int64_t first = v * kLanes, there = std::min(kLanes, rows - first);
    const Lanes scale = weights_of(head, first, base, count, plane);
    for (int64_t start = head.low, until; start < head.end; start = until) {
      until = std::min(start - start % kPiece + kPiece, head.end);
      weigh_piece(head, start, until, scale, plane + (start - base) * kLanes, there,
                  start == head.low, output + first * dim);
    }
  }
}

// The same for a tile of each head, whose rows a vector holds, by threads that share the keys of a head.
// queries: [heads, dim, kLanes]; scores: room for [heads, keys, kLanes]; sums: room for [heads,
// pieces, rows, dim], of which a head's first become its output.
void attend_together(const std::vector<Head>& heads, const float* queries, int64_t rows, int64_t keys,
                     int64_t pieces, float* scores, float* sums) {
  const int64_t count = static_cast<int64_t>(heads.size()), dim = heads[0].dim, size = rows * dim;
  const auto each_piece = [&](const auto& work) {
    in_parallel(count * pieces, 2 * rows * kPiece * dim, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const Head& head = heads[item / pieces];
        const int64_t from = (head.low / kPiece + item % pieces) * kPiece;
        const int64_t start = std::max(from, head.low), until = std::min(from + kPiece, head.end);
        if (start < until) work(item / pieces, start, until, sums + item * size);
      }
    });
  };
  const auto score_of = [&](int64_t h, int64_t key) {
    return scores + (h * keys + key - aligned(heads[h].low)) * kLanes;
  };
  each_piece([&](int64_t h, int64_t start, int64_t until, float*) {
    const int64_t from = aligned(start), to = aligned(until + kAligned - 1);
    score_all(heads[h].keys + from * dim, queries + h * dim * kLanes, 1, dim, to - from,
              score_of(h, from));
  });
  std::vector<Lanes> scales(count);
  in_parallel(count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) {
      const int64_t base = aligned(heads[h].low), top = aligned(heads[h].end + kAligned - 1);
      scales[h] = weights_of(heads[h], 0, base, top - base, score_of(h, base));
    }
  });
  each_piece([&](int64_t h, int64_t start, int64_t until, float* output) {
    weigh_piece(heads[h], start, until, scales[h], score_of(h, start), rows, true, output);
  });
  for (int64_t h = 0; h < count; ++h)
    for (int64_t p = 1; p <= (heads[h].end - 1) / kPiece - heads[h].low / kPiece; ++p)
      for (int64_t i = 0; i < size; ++i)
        sums[h * pieces * size + i] += sums[(h * pieces + p) * size + i];
}

// How many tokens a tile has, so that its scores stay in the cache, and threads have tiles alike.
int64_t tile_tokens(int64_t tokens, int64_t groups, int64_t keys, int64_t heads) {
  const int64_t most = std::clamp(kScores / std::max<int64_t>(1, keys), kLanes, kTileRows);
  int64_t tiles = std::max<int64_t>(1, (tokens * groups + most - 1) / most);
  const int64_t threads = torch::stable::get_num_threads();
  while (tiles < tokens && (tiles * heads) % threads != 0 && tiles * heads < 4 * threads) ++tiles;
  return std::max<int64_t>(1, (tokens + tiles - 1) / tiles);
}

// What `engine.attention.dense` computes without a softcap and sinks, for S sequences of as many
// tokens each: rows [first, first + S * tokens) of query [T, Hq, D], key and value [T, Hkv, D], of
// any strides but the last, and of output [T, Hq, D]. runs: of each sequence, [parts, Hkv, capacity,
// D]; positions: that of its first token.
void attend_rows(const Tensor& query, const Tensor& key, const Tensor& value, int64_t first,
                 int64_t tokens, bool is_written, const std::vector<Tensor>& runs,
                 const std::vector<int64_t>& positions, int64_t key_part, int64_t value_part,
                 std::optional<int64_t> window, double scaling, const Tensor& output) {
  const int64_t heads = query.size(1), dim = query.size(2), kv_heads = key.size(1);
  const int64_t groups = heads / kv_heads, sequences = static_cast<int64_t>(positions.size());
  STD_TORCH_CHECK(dim % kAligned == 0 && value.size(2) == dim, "heads of ", dim);
  STD_TORCH_CHECK(query.stride(2) == 1 && key.stride(2) == 1 && value.stride(2) == 1, "strides");
  STD_TORCH_CHECK(output.is_contiguous() && output.size(2) == dim &&
                      tokens > 0 && first + sequences * tokens <= output.size(0),
                  "another output");
  STD_TORCH_CHECK(runs.size() == positions.size(), "as many runs as positions");
  const int64_t reach = window.value_or(std::numeric_limits<int64_t>::max() / 2);
  std::vector<float*> starts;
  int64_t longest = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    const Tensor& run = runs[s];
    const int64_t end = positions[s] + tokens;
    STD_TORCH_CHECK(run.is_contiguous() && run.size(0) > std::max(key_part, value_part) &&
                        run.size(1) == kv_heads && run.size(3) == dim &&
                        (end + kAligned - 1) / kAligned * kAligned <= run.size(2),
                    "sequence ", s, " has another run");
    starts.push_back(write(run));
    longest = std::max(longest, std::min(end, reach + tokens));
  }
  const float *q = read(query), *k = read(key), *v = read(value);
  float* to = write(output);
  const auto part_of = [&](int64_t s, int64_t part, int64_t h) {
    return starts[s] + (part * kv_heads + h) * runs[s].size(2) * dim;
  };
  if (is_written)
    in_parallel(sequences * kv_heads, 2 * tokens * dim, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t s = item / kv_heads, h = item % kv_heads;
        float *keys = part_of(s, key_part, h), *values = part_of(s, value_part, h);
        for (int64_t t = 0; t < tokens; ++t) {
          const int64_t row = first + s * tokens + t, position = positions[s] + t;
          std::copy_n(k + row * key.stride(0) + h * key.stride(1), dim, keys + position * dim);
          if (value_part != key_part)
            std::copy_n(v + row * value.stride(0) + h * value.stride(1), dim,
                        values + position * dim);
        }
      }
    });
  const auto turn = [&](int64_t s, int64_t h, int64_t from, int64_t count, float* queries) {
    for (int64_t i = 0; i < count * groups; ++i) {
      const float* one = q + (first + s * tokens + from + i / groups) * query.stride(0) +
                         (h * groups + i % groups) * query.stride(1);
      float* turned = queries + i / kLanes * dim * kLanes + i % kLanes;
      for (int64_t d = 0; d < dim; ++d) turned[d * kLanes] = one[d] * static_cast<float>(scaling);
    }
  };
  const auto head_of = [&](int64_t s, int64_t h, int64_t from, int64_t count) {
    const int64_t start = positions[s] + from, low = std::max<int64_t>(0, start + 1 - reach);
    return Head{part_of(s, key_part, h), part_of(s, value_part, h), dim, low, start + count,
                count - 1, groups, reach};
  };
  const auto put = [&](int64_t s, int64_t h, int64_t from, int64_t count, const float* attended) {
    for (int64_t t = 0; t < count; ++t)
      std::copy_n(attended + t * groups * dim, groups * dim,
                  to + ((first + s * tokens + from + t) * heads + h * groups) * dim);
  };
  const int64_t items = sequences * kv_heads, tile = tile_tokens(tokens, groups, longest, items);
  const int64_t tiles = (tokens + tile - 1) / tile, rows = tile * groups;
  const int64_t padded = (rows + kLanes - 1) / kLanes * kLanes, keys = longest + 2 * kAligned;
  const int64_t threads = torch::stable::get_num_threads();
  if (tiles == 1 && rows <= kLanes && longest >= kShared && items < 4 * threads && items % threads &&
      items * keys * kLanes <= kSharedScores) {
    const int64_t pieces = longest / kPiece + 2;
    float* queries = room_for(items * (dim * kLanes + keys * kLanes + pieces * rows * dim));
    float *scores = queries + items * dim * kLanes, *sums = scores + items * keys * kLanes;
    std::fill_n(queries, items * dim * kLanes, 0.f);
    std::vector<Head> all;
    for (int64_t i = 0; i < items; ++i) {
      turn(i / kv_heads, i % kv_heads, 0, tokens, queries + i * dim * kLanes);
      all.push_back(head_of(i / kv_heads, i % kv_heads, 0, tokens));
    }
    attend_together(all, queries, rows, keys, pieces, scores, sums);
    for (int64_t i = 0; i < items; ++i)
      put(i / kv_heads, i % kv_heads, 0, tokens, sums + i * pieces * rows * dim);
    return;
  }
  in_parallel(items * tiles, 2 * rows * longest * dim, [&](int64_t begin, int64_t end) {
    float *queries = room_for(padded * (keys + dim) + rows * dim), *attended = queries + padded * dim;
    float* scores = attended + rows * dim;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t s = item / (kv_heads * tiles), h = item / tiles % kv_heads, i = item % tiles;
      // Early tiles, which see few keys, by turns with late ones: threads that share a head wait less.
      const int64_t from = (i % 2 ? tiles - 1 - i / 2 : i / 2) * tile;
      const int64_t count = std::min(tile, tokens - from);
      std::fill_n(queries, padded * dim, 0.f);
      turn(s, h, from, count, queries);
      attend_tile(head_of(s, h, from, count), queries, count * groups, scores, attended);
      put(s, h, from, count, attended);
    }
  });
}

// Blocks. Nothing is computed, bytes are moved: past the caches, because what is moved is more than
// these hold, and a cached store would read each line from memory before it replaces it.

bool on_a_line(const void* at) { return reinterpret_cast<uintptr_t>(at) % kLine == 0; }

// Write the line at `to`, which begins on one.
template <class Word>
void stream(Word* to, const Word (&line)[kLine / sizeof(Word)]) {
  for (size_t half = 0; half < kLine / sizeof(Word); half += kLine / sizeof(Word) / 2)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + half),
                        *reinterpret_cast<const __m256i*>(line + half));
}

// Copies tensors without gaps to others of as many bytes.
void copy(const std::vector<Tensor>& to, const std::vector<Tensor>& from) {
  constexpr int64_t kPiece = 1 << 18;
  struct Piece {
    char* to;
    const char* from;
    int64_t bytes;
  };
  std::vector<Piece> pieces;
  STD_TORCH_CHECK(to.size() == from.size(), "as many as there are");
  for (size_t i = 0; i < to.size(); ++i) {
    const int64_t bytes = to[i].numel() * to[i].element_size();
    STD_TORCH_CHECK(to[i].is_contiguous() && from[i].is_contiguous() &&
                        bytes == static_cast<int64_t>(from[i].numel() * from[i].element_size()),
                    "other sizes");
    for (int64_t at = 0; at < bytes; at += kPiece)
      pieces.push_back({static_cast<char*>(to[i].data_ptr()) + at,
                        static_cast<const char*>(from[i].data_ptr()) + at,
                        std::min(kPiece, bytes - at)});
  }
  in_parallel(pieces.size(), kPiece / sizeof(float), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto [to, from, bytes] = pieces[i];
      const int64_t streamed = on_a_line(to) ? bytes / kLine * kLine : 0;
      for (int64_t at = 0; at < streamed; at += kLine) {
        alignas(kLine) char line[kLine];
        std::copy_n(from + at, kLine, line);
        stream(to + at, line);
      }
      std::copy_n(from + streamed, bytes - streamed, to + streamed);
    }
    _mm_sfence();
  });
}

// Fill `items`, of so many lanes of n words. one(i, to, stride) writes word i of all lanes, `stride`
// words apart.
template <class Word, int kItemLanes, class One>
void join(Word* __restrict items, size_t n, const One& one) {
  constexpr size_t kWords = kLine / sizeof(Word);
  size_t i = 0;
  if (on_a_line(items) && n % kWords == 0)
    for (; i < n; i += kWords) {
      alignas(kLine) Word lines[kItemLanes][kWords];
      for (size_t k = 0; k < kWords; ++k) one(i + k, lines[0] + k, kWords);
      for (int lane = 0; lane < kItemLanes; ++lane) stream(items + lane * n + i, lines[lane]);
    }
  _mm_sfence();  // before another thread hears of it
  for (; i < n; ++i) one(i, items + i, n);
}

}  // namespace

// Not called by a forward: a record of the disk tier is joined in one call instead of twenty of
// numpy's (tiers.disk.format.planes).

extern "C" void cachesvc_join16(const uint16_t* __restrict low, const uint16_t* __restrict high,
                                uint16_t* __restrict items, size_t n) {
  join<uint16_t, 2>(items, n, [=](size_t i, uint16_t* to, size_t stride) {
    to[0] = static_cast<uint16_t>((low[i] & 0xFF) | (high[i] << 8));
    to[stride] = static_cast<uint16_t>((low[i] >> 8) | (high[i] & 0xFF00));
  });
}

extern "C" void cachesvc_join32(const uint32_t* __restrict low, const uint32_t* __restrict high,
                                uint32_t* __restrict items, size_t n) {
  constexpr uint32_t kTop = 0xFF000000u;
  join<uint32_t, 4>(items, n, [=](size_t i, uint32_t* to, size_t stride) {
    const uint32_t a = low[i], b = low[n + i], c = low[2 * n + i], h = high[i];
    to[0] = (a & ~kTop) | (h << 24);
    to[stride] = (b & ~kTop) | ((h << 16) & kTop);
    to[2 * stride] = (c & ~kTop) | ((h << 8) & kTop);
    to[3 * stride] = (h & kTop) | (a >> 24) | ((b >> 16) & 0xFF00u) | ((c >> 8) & 0xFF0000u);
  });
}

STABLE_TORCH_LIBRARY_IMPL(cachesvc, CPU, library) {
  library.impl("norm", TORCH_BOX(&norm));
  library.impl("silu_mul", TORCH_BOX(&silu_mul));
  library.impl("gelu_mul", TORCH_BOX(&gelu_mul));
  library.impl("rotate", TORCH_BOX(&rotate));
  library.impl("attend_rows", TORCH_BOX(&attend_rows));
  library.impl("copy", TORCH_BOX(&copy));
  library.impl("narrow", TORCH_BOX(&narrow));
  library.impl("widen", TORCH_BOX(&widen));
  library.impl("linear", TORCH_BOX(&linear));
}
