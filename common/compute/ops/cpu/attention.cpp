// Paged attention on the CPU: every row in one fixed order, so that its bits depend on nothing beside it.
//
// A row (one query head of one token) sees its keys in chunks of KEYS, counted from position 0, with an online
// softmax over chunks (FlashAttention, https://arxiv.org/abs/2205.14135). What a row computes depends on its
// position and its window alone, never on the rows that share its tile: tiles only share converted keys and values.
// Vectors are the compiler's (16 floats), so the order of additions is the same on every machine.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int LANES = 16;   // tokens of a block, and floats of a vector
constexpr int KEYS = 128;   // of a softmax chunk
constexpr int ROWS = 48;    // of a tile, at most
// Products of a row and a key that are worth a thread, some 2 ms: for less, torch's own threads still wait for work,
// and waiting they take the core.
constexpr double WORTH_A_THREAD = 5e5;
constexpr int AHEAD = 2;    // blocks fetched ahead of use

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t Int __attribute__((vector_size(64)));

struct BFloat16 { uint16_t bits; };
typedef _Float16 Half;

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Vec load(const BFloat16* p) {
  typedef uint16_t Short __attribute__((vector_size(32)));
  typedef uint32_t Word __attribute__((vector_size(64)));
  Short s;
  std::memcpy(&s, p, sizeof s);
  return (Vec)(__builtin_convertvector(s, Word) << 16);
}
inline Vec load(const Half* p) {
  typedef _Float16 Halves __attribute__((vector_size(32)));
  Halves h;
  std::memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, Vec);
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline void narrow(float* to, float x) { *to = x; }
inline void narrow(Half* to, float x) { *to = (Half)x; }
inline void narrow(BFloat16* to, float x) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to->bits = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void prefetch(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht0 %0" : : "m"(*(const char*)p));  // the compiler drops loops of nothing but its own builtin
#else
  __builtin_prefetch(p);
#endif
}

// e^x for x <= 0, within 2 ulp; 0 below the smallest normal number.
inline Vec exp_negative(Vec x) {
  const Vec magic = (Vec){} + 12582912.0f;  // 1.5 * 2^23: rounds to whole numbers
  const Vec n = (x * 1.44269504f + magic) - magic;
  Vec r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec p = (Vec){} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Int exponent = __builtin_convertvector(n, Int) << 23;
  const Vec scaled = (Vec)((Int)p + exponent);
  return x < -87.0f ? (Vec){} : scaled;
}

// 16 vectors to one: lane i is the sum of vector i.
inline Vec fold(Vec x, Vec y, Int a, Int b) {
  return __builtin_shuffle(x, y, a) + __builtin_shuffle(x, y, b);
}
inline Vec sums(const Vec* v) {
  const Int a1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
  const Int b1 = {1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31};
  const Int a2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
  const Int b2 = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
  const Int a3 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
  const Int b3 = {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31};
  const Int a4 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
  const Int b4 = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
  Vec w[8];
  for (int i = 0; i < 8; i++) w[i] = fold(v[2 * i], v[2 * i + 1], a1, b1);
  for (int i = 0; i < 4; i++) w[i] = fold(w[2 * i], w[2 * i + 1], a2, b2);
  for (int i = 0; i < 2; i++) w[i] = fold(w[2 * i], w[2 * i + 1], a3, b3);
  return fold(w[0], w[1], a4, b4);
}
inline float sum(Vec v) {
  float x[LANES];
  store(x, v);
  for (int step = LANES / 2; step; step /= 2)
    for (int i = 0; i < step; i++) x[i] += x[i + step];
  return x[0];
}
inline float largest(Vec v) {
  float x[LANES];
  store(x, v);
  return *std::max_element(x, x + LANES);
}

}  // namespace

extern "C" {

// All of one layer of one step. Strides and offsets in elements; a block's K/V of a layer are [kv head, 16, dim].
struct Step {
  const void* q;          // [T, heads, dim]
  void* out;              // [T, heads, dim]
  const void* cache;
  int64_t block_stride;
  int64_t key_offset;     // of the layer's keys in a block
  int64_t value_offset;
  int32_t dtype;          // 0 float32, 1 bfloat16, 2 float16
  int32_t heads, kv_heads, dim;
  int32_t num_chunks;
  const int64_t* row_starts;  // [chunks + 1]
  const int64_t* contexts;    // [chunks]: tokens that a chunk's last row sees
  const int64_t* table_starts;  // [chunks + 1]: where a chunk's table of blocks begins
  const int64_t* block_ids;   // of all tables
  int32_t window;         // tokens that a row sees at most, itself included; 0: all
  float scale;
  float softcap;          // 0: none
  int32_t threads;
};

}  // extern "C"

namespace {

struct Task { int chunk, head, heads, first, count; };  // tokens [first, first + count) of a chunk, some kv heads

template <typename T, int N>  // N vectors a head
void run(const Step& step, const Task& task) {
  constexpr int DIM = N * LANES;
  const int group = step.heads / step.kv_heads;
  const int each = task.count * group;  // rows of a kv head
  const int rows = task.heads * each;   // row r is head r / each, token r % each / group
  const int64_t first_row = step.row_starts[task.chunk] + task.first;
  const int64_t last_row = step.row_starts[task.chunk + 1] - 1;
  const int64_t first_position = step.contexts[task.chunk] - 1 - (last_row - first_row);
  const int64_t* table = step.block_ids + step.table_starts[task.chunk];

  alignas(64) float queries[ROWS][DIM], outputs[ROWS][DIM], scores[ROWS][KEYS], block[LANES][DIM];
  float top[ROWS], total[ROWS];
  int64_t position[ROWS], low[ROWS];  // of each row, and of the first key that it sees
  const T* q = (const T*)step.q;
  const auto element = [&](int r) {  // where a row's query and output are
    const int64_t token = first_row + r % each / group;
    return (token * step.heads + (task.head + r / each) * group + r % group) * DIM;
  };
  for (int r = 0; r < rows; r++) {
    const T* row = q + element(r);
    for (int i = 0; i < N; i++) {
      store(&queries[r][i * LANES], load(row + i * LANES) * step.scale);
      store(&outputs[r][i * LANES], (Vec){});
    }
    top[r] = -INFINITY;
    total[r] = 0;
    position[r] = first_position + r % each / group;
    low[r] = step.window ? std::max<int64_t>(0, position[r] - step.window + 1) : 0;
  }
  const int64_t last_position = first_position + task.count - 1;
  const int64_t last_block = last_position / LANES;
  const int64_t lowest = low[0];
  const T* head = (const T*)step.cache + (int64_t)task.head * LANES * DIM;
  // Blocks lie anywhere, so no hardware guesses the next: each row fetches its part of a block that comes later.
  const size_t lines = task.heads * LANES * DIM * sizeof(T) / 64;
  const auto fetch = [&](int64_t index, int64_t offset, int r) {
    const char* next = (const char*)(head + table[std::min(index, last_block)] * step.block_stride + offset);
    for (size_t i = lines * r / rows; i < lines * (r + 1) / rows; i++) prefetch(next + i * 64);
  };
  const Int lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

  for (int64_t chunk = lowest / KEYS * KEYS; chunk <= last_position; chunk += KEYS) {
    const int blocks = (int)std::min<int64_t>(KEYS / LANES, (last_position - chunk) / LANES + 1);
    for (int b = 0; b < blocks; b++) {
      const int64_t base = chunk + b * LANES;
      if (base + LANES <= lowest) continue;
      const T* keys = head + table[base / LANES] * step.block_stride + step.key_offset;
      for (int r = 0; r < rows; r++) {
        fetch(base / LANES + AHEAD, step.key_offset, r);
        if (r % each == 0)
          for (int j = 0; j < LANES; j++, keys += DIM)
            for (int i = 0; i < N; i++) store(&block[j][i * LANES], load(keys + i * LANES));
        if (base > position[r]) continue;
        Vec dots[LANES];
        for (int j = 0; j < LANES; j++) {
          Vec dot = load(&queries[r][0]) * load(&block[j][0]);
          for (int i = 1; i < N; i++) dot += load(&queries[r][i * LANES]) * load(&block[j][i * LANES]);
          dots[j] = dot;
        }
        Vec score = sums(dots);
        if (step.softcap > 0)
          for (int j = 0; j < LANES; j++) score[j] = step.softcap * std::tanh(score[j] / step.softcap);
        const Int key = lanes + (int32_t)base;
        const Int seen = (key <= (int32_t)position[r]) & (key >= (int32_t)low[r]);
        store(&scores[r][b * LANES], seen ? score : (Vec){} - INFINITY);
      }
    }
    for (int r = 0; r < rows; r++) {  // scores become probabilities, relative to the largest so far
      if (chunk > position[r] || chunk + KEYS <= low[r]) continue;
      const int begin = (int)(std::max(low[r], chunk) - chunk) / LANES;
      const int end = (int)(std::min<int64_t>(position[r], chunk + KEYS - 1) - chunk) / LANES + 1;
      Vec most = load(&scores[r][begin * LANES]);
      for (int b = begin + 1; b < end; b++) {
        const Vec other = load(&scores[r][b * LANES]);
        most = most > other ? most : other;
      }
      const float best = std::max(top[r], largest(most));
      Vec weight = {};
      for (int b = begin; b < end; b++) {
        const Vec p = exp_negative(load(&scores[r][b * LANES]) - best);
        store(&scores[r][b * LANES], p);
        weight += p;
      }
      const float keep = top[r] == -INFINITY ? 0.0f : exp_negative((Vec){} + (top[r] - best))[0];
      total[r] = total[r] * keep + sum(weight);
      if (keep != 1.0f)
        for (int i = 0; i < N; i++) store(&outputs[r][i * LANES], load(&outputs[r][i * LANES]) * keep);
      top[r] = best;
    }
    for (int b = 0; b < blocks; b++) {
      const int64_t base = chunk + b * LANES;
      if (base + LANES <= lowest) continue;
      const T* values = head + table[base / LANES] * step.block_stride + step.value_offset;
      for (int r = 0; r < rows; r++) {
        fetch(base / LANES + AHEAD, step.value_offset, r);
        if (r % each == 0)
          for (int j = 0; j < LANES; j++, values += DIM)
            for (int i = 0; i < N; i++) store(&block[j][i * LANES], load(values + i * LANES));
        const int begin = (int)std::max<int64_t>(0, low[r] - base);
        const int end = (int)std::min<int64_t>(LANES, position[r] - base + 1);
        if (begin >= end) continue;
        Vec out[N];
        for (int i = 0; i < N; i++) out[i] = load(&outputs[r][i * LANES]);
        for (int j = begin; j < end; j++) {
          const float p = scores[r][b * LANES + j];
          for (int i = 0; i < N; i++) out[i] += p * load(&block[j][i * LANES]);
        }
        for (int i = 0; i < N; i++) store(&outputs[r][i * LANES], out[i]);
      }
    }
  }
  T* out = (T*)step.out;
  for (int r = 0; r < rows; r++) {
    T* row = out + element(r);
    for (int d = 0; d < DIM; d++) narrow(row + d, outputs[r][d] / total[r]);
  }
}

template <typename T>
void run_dim(const Step& step, const Task& task) {
  switch (step.dim / LANES) {
    case 1: return run<T, 1>(step, task);
    case 2: return run<T, 2>(step, task);
    case 3: return run<T, 3>(step, task);
    case 4: return run<T, 4>(step, task);
    case 5: return run<T, 5>(step, task);
    case 6: return run<T, 6>(step, task);
    case 8: return run<T, 8>(step, task);
    case 16: return run<T, 16>(step, task);
  }
}

void run_any(const Step& step, const Task& task) {
  switch (step.dtype) {
    case 0: return run_dim<float>(step, task);
    case 1: return run_dim<BFloat16>(step, task);
    case 2: return run_dim<Half>(step, task);
  }
}

}  // namespace

// Returns 0, or 1 for a shape that it can't do.
extern "C" int paged_attention(const Step* step) {
  const int group = step->heads / step->kv_heads, n = step->dim / LANES;
  const bool known = n == 1 || n == 2 || n == 3 || n == 4 || n == 5 || n == 6 || n == 8 || n == 16;
  if (step->dim % LANES || !known || group > ROWS || step->dtype > 2) return 1;
  std::vector<Task> tasks;
  const int most = std::max(1, ROWS / group);
  // A single token's heads go together, since their keys lie together; unless there are too few for all threads.
  const bool together = step->num_chunks >= 2 * step->threads || step->threads == 1;
  for (int chunk = 0; chunk < step->num_chunks; chunk++) {
    const int length = (int)(step->row_starts[chunk + 1] - step->row_starts[chunk]);
    const int heads = length == 1 && together ? std::min(step->kv_heads, most) : 1;
    for (int first = 0; first < length; first += most)
      for (int head = 0; head < step->kv_heads; head += heads)
        tasks.push_back({chunk, head, std::min(heads, step->kv_heads - head), first, std::min(most, length - first)});
  }
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next++) < tasks.size();) run_any(*step, tasks[i]);
  };
  double products = 0;
  for (int chunk = 0; chunk < step->num_chunks; chunk++)
    products += (double)(step->row_starts[chunk + 1] - step->row_starts[chunk]) * step->heads * step->contexts[chunk];
  const double most_threads = std::min<double>(std::min<double>(step->threads, tasks.size()), products / WORTH_A_THREAD);
  const int helpers = (int)std::max(1.0, most_threads) - 1;
  std::vector<std::thread> others;
  for (int i = 0; i < helpers; i++) others.emplace_back(work);
  work();
  for (auto& other : others) other.join();
  return 0;
}
