// Operators that a recorded forward calls in place of several of torch's (engine.operators).
//
// Each computes the bits of the calls that it replaces: the same vector functions, from torch's own
// headers, and sums in the same order. The order stands beside each sum. A start compares the bits
// before it uses them, so a torch that sums in another order costs speed and changes no answer.
// Compile without contraction: a product and a sum are one operation only where fmadd says so.
//
// All tensors are float32 on a CPU. Threads are those of torch's own team. No Python here.

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

namespace {

using torch::stable::Tensor;
using Lanes = at::vec::Vectorized<float>;

constexpr int64_t kLanes = Lanes::size();
constexpr int64_t kGrain = 32768;  // numbers for which another thread pays, as torch counts
constexpr int64_t kAligned = 16;   // keys: a softmax begins and ends at a multiple
constexpr int64_t kPiece = 192;    // keys whose values are added in one chain
constexpr int kRows = 4;           // query heads that share one reading of keys and values

const float* read(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.scalar_type() == torch::headeronly::ScalarType::Float, "not float32");
  return static_cast<const float*>(tensor.data_ptr());
}

float* write(const Tensor& tensor) { return const_cast<float*>(read(tensor)); }

Tensor empty(std::vector<int64_t> sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      sizes.size(), sizes.data(), strides.data(), aoti_torch_dtype_float32(),
      aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

std::vector<int64_t> sizes_of(const Tensor& tensor) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < tensor.dim(); ++i) sizes.push_back(tensor.size(i));
  return sizes;
}

template <class Work>
void in_parallel(int64_t count, int64_t cost_of_one, const Work& work) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, cost_of_one));
  if (count <= grain) return work(0, count);
  torch::stable::parallel_for(0, count, grain, work);
}

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

// x / sqrt(mean(x^2) + eps) over the last dimension. eps: one float64, as a recorder keeps a number.
Tensor norm(const Tensor& x, const Tensor& eps) {
  STD_TORCH_CHECK(x.is_contiguous(), "not contiguous");
  STD_TORCH_CHECK(eps.scalar_type() == torch::headeronly::ScalarType::Double && eps.numel() == 1,
                  "eps is not one float64");
  Tensor output = empty(sizes_of(x));
  const int64_t width = x.size(x.dim() - 1), rows = x.numel() / std::max<int64_t>(1, width);
  const float *from = read(x), added = static_cast<float>(*static_cast<const double*>(eps.data_ptr()));
  float* to = write(output);
  in_parallel(rows, width, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float mean = sum_of_squares(from + i * width, width) / static_cast<float>(width);
      const float scale = 1.f / std::sqrt(mean + added);
      for (int64_t j = 0; j < width; ++j) to[i * width + j] = from[i * width + j] * scale;
    }
  });
  return output;
}

// silu(gate) * up.
Tensor silu_mul(const Tensor& gate, const Tensor& up) {
  STD_TORCH_CHECK(gate.is_contiguous() && up.is_contiguous(), "not contiguous");
  STD_TORCH_CHECK(sizes_of(gate) == sizes_of(up), "other sizes");
  Tensor output = empty(sizes_of(gate));
  const float *g = read(gate), *u = read(up);
  float* to = write(output);
  in_parallel(gate.numel() / kLanes + 1, 8 * kLanes, [&](int64_t begin, int64_t end) {
    const int64_t at = begin * kLanes, stop = std::min(end * kLanes, gate.numel());
    at::vec::map2(
        [](Lanes x, Lanes y) { return x / (Lanes(1.f) + x.neg().exp()) * y; },
        to + at, g + at, u + at, stop - at);
  });
  return output;
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

// Attention of single tokens.

// scores[r][j] = query[r] . key[j] for `count` keys, a multiple of kAligned. Each is one chain of
// multiply-adds over the head's numbers, as in MKL's matrix products of up to kPiece.
template <int R>
void score(const float* query, const float* keys, int64_t dim, int64_t count, float* scores,
           float* turned) {
  constexpr int C = static_cast<int>(kAligned / kLanes);
  for (int64_t first = 0; first < count; first += kAligned) {
    const float* block = keys + first * dim;
    for (int64_t d = 0; d < dim; d += kLanes)
      for (int c = 0; c < C; ++c)
        at::vec::transpose_mxn<float, kLanes, kLanes>(
            block + c * kLanes * dim + d, dim, turned + d * kAligned + c * kLanes, kAligned);
    Lanes sums[R][C];
    for (auto& row : sums)
      for (auto& sum : row) sum = Lanes(0.f);
    for (int64_t d = 0; d < dim; ++d)
      for (int c = 0; c < C; ++c) {
        const Lanes key = Lanes::loadu(turned + d * kAligned + c * kLanes);
        for (int r = 0; r < R; ++r)
          sums[r][c] = at::vec::fmadd(Lanes(query[r * dim + d]), key, sums[r][c]);
      }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) sums[r][c].store(scores + r * count + first + c * kLanes);
  }
}

// output[r] += weights[r] @ values for C vectors of each row, one chain over `count` keys.
template <int R, int C>
void weigh(const float* weights, int64_t stride, const float* values, int64_t dim, int64_t count,
           bool is_first, float* output) {
  Lanes sums[R][C];
  for (auto& row : sums)
    for (auto& sum : row) sum = Lanes(0.f);
  for (int64_t j = 0; j < count; ++j)
    for (int c = 0; c < C; ++c) {
      const Lanes value = Lanes::loadu(values + j * dim + c * kLanes);
      for (int r = 0; r < R; ++r)
        sums[r][c] = at::vec::fmadd(Lanes(weights[r * stride + j]), value, sums[r][c]);
    }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      float* to = output + r * dim + c * kLanes;
      (is_first ? sums[r][c] : Lanes::loadu(to) + sums[r][c]).store(to);
    }
}

// As torch's softmax over the last dimension (aten/src/ATen/native/cpu/SoftMaxKernel.cpp).
void softmax(float* row, int64_t count) {
  const float most =
      at::vec::reduce_all<float>([](Lanes x, Lanes y) { return at::vec::maximum(x, y); }, row, count);
  at::vec::map([&](Lanes x) { return (x - Lanes(most)).exp(); }, row, row, count);
  const float sum = at::vec::reduce_all<float>([](Lanes x, Lanes y) { return x + y; }, row, count);
  at::vec::map([&](Lanes x) { return x * Lanes(1 / sum); }, row, row, count);
}

// One head's keys and values of a sequence, [capacity, dim], and the keys [low, end) that its token
// sees.
struct Head {
  const float *keys, *values;
  int64_t dim, low, end;
};

// R query rows [R, dim] over one head. scratch: [R, keys], and a block of keys turned.
template <int R>
void attend_rows(const Head& head, const float* query, float* scratch, float* output) {
  const int64_t base = head.low - head.low % kAligned;
  const int64_t top = (head.end + kAligned - 1) / kAligned * kAligned, count = top - base;
  score<R>(query, head.keys + base * head.dim, head.dim, count, scratch, scratch + R * count);
  constexpr float kUnseen = -std::numeric_limits<float>::infinity();
  for (int r = 0; r < R; ++r) {
    float* row = scratch + r * count;
    std::fill(row, row + (head.low - base), kUnseen);
    std::fill(row + (head.end - base), row + count, kUnseen);
    softmax(row, count);
  }
  for (int64_t start = head.low; start < head.end;) {
    const int64_t until = std::min(start - start % kPiece + kPiece, head.end);
    const float *weights = scratch + (start - base), *values = head.values + start * head.dim;
    const bool is_first = start == head.low;
    constexpr int C = kLanes == 16 ? 4 : 3;
    int64_t at = 0;
    for (; at + C * kLanes <= head.dim; at += C * kLanes)
      weigh<R, C>(weights, count, values + at, head.dim, until - start, is_first, output + at);
    for (; at < head.dim; at += kLanes)
      weigh<R, 1>(weights, count, values + at, head.dim, until - start, is_first, output + at);
    start = until;
  }
}

void attend_head(const Head& head, const float* query, int64_t rows, float* scratch, float* output) {
  for (; rows > 0; rows -= kRows, query += kRows * head.dim, output += kRows * head.dim) {
    if (rows == 1) attend_rows<1>(head, query, scratch, output);
    if (rows == 2) attend_rows<2>(head, query, scratch, output);
    if (rows == 3) attend_rows<3>(head, query, scratch, output);
    if (rows >= 4) attend_rows<4>(head, query, scratch, output);
  }
}

// What `engine.attention.dense.attend_tokens` computes without a softcap and sinks: rows [first,
// first + S) of query [T, Hq, D], key and value [T, Hkv, D], of any strides but the last, and of
// output [T, Hq, D]. runs: of each of S sequences, [parts, Hkv, capacity, D].
void attend_tokens(const Tensor& query, const Tensor& key, const Tensor& value, int64_t first,
                   bool is_written, const std::vector<Tensor>& runs,
                   const std::vector<int64_t>& positions, int64_t key_part, int64_t value_part,
                   std::optional<int64_t> window, double scaling, const Tensor& output) {
  const int64_t heads = query.size(1), dim = query.size(2), kv_heads = key.size(1);
  const int64_t groups = heads / kv_heads, sequences = static_cast<int64_t>(positions.size());
  STD_TORCH_CHECK(dim % kAligned == 0 && dim <= kPiece && value.size(2) == dim, "heads of ", dim);
  STD_TORCH_CHECK(query.stride(2) == 1 && key.stride(2) == 1 && value.stride(2) == 1, "strides");
  STD_TORCH_CHECK(output.is_contiguous() && first + sequences <= output.size(0), "another output");
  STD_TORCH_CHECK(runs.size() == positions.size(), "as many runs as positions");
  const int64_t reach = window.value_or(std::numeric_limits<int64_t>::max());
  std::vector<float*> starts;
  int64_t longest = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    const Tensor& run = runs[s];
    const int64_t end = positions[s] + 1;
    STD_TORCH_CHECK(run.is_contiguous() && run.size(0) > std::max(key_part, value_part) &&
                        run.size(1) == kv_heads && run.size(3) == dim &&
                        (end + kAligned - 1) / kAligned * kAligned <= run.size(2),
                    "sequence ", s, " has another run");
    starts.push_back(write(run));
    longest = std::max(longest, std::min(end, reach));
  }
  const float *q = read(query), *k = read(key), *v = read(value);
  float* to = write(output);
  const int64_t room = kRows * (longest + 2 * kAligned) + kAligned * dim;
  in_parallel(sequences * kv_heads, 4 * longest * dim, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(room), scaled(groups * dim);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t s = item / kv_heads, h = item % kv_heads, row = first + s;
      const int64_t position = positions[s], size = runs[s].size(2) * dim;
      float* keys = starts[s] + (key_part * kv_heads + h) * size;
      float* values = starts[s] + (value_part * kv_heads + h) * size;
      if (is_written) {
        std::copy_n(k + row * key.stride(0) + h * key.stride(1), dim, keys + position * dim);
        if (value_part != key_part)
          std::copy_n(v + row * value.stride(0) + h * value.stride(1), dim, values + position * dim);
      }
      for (int64_t g = 0; g < groups; ++g) {
        const float* from = q + row * query.stride(0) + (h * groups + g) * query.stride(1);
        for (int64_t d = 0; d < dim; ++d)
          scaled[g * dim + d] = from[d] * static_cast<float>(scaling);
      }
      const int64_t low = position < reach ? 0 : position - reach + 1;
      attend_head({keys, values, dim, low, position + 1}, scaled.data(), groups, scratch.data(),
                  to + (row * heads + h * groups) * dim);
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cachesvc, CPU, library) {
  library.impl("norm", TORCH_BOX(&norm));
  library.impl("silu_mul", TORCH_BOX(&silu_mul));
  library.impl("rotate", TORCH_BOX(&rotate));
  library.impl("attend_tokens", TORCH_BOX(&attend_tokens));
}
