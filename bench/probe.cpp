// What this CPU can do at best: reading memory in order, and multiplying matrices that are in registers or L1.
//
//     probe THREADS
//
// Prints one JSON object. Each thread is bound to a CPU of its own, of those the process may use. All threads do the
// same work at the same time; a figure is that of the best of several rounds, all threads together.

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kChains = 16;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kChains = 12;
#else
constexpr int kVectorBytes = 16, kChains = 12;
#endif
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint64_t Words __attribute__((vector_size(64)));  // a cache line, as however many registers that takes

constexpr size_t kBufferBytes = size_t(256) << 20;  // a thread's; far more than any cache shared by few cores
constexpr size_t kHugePage = size_t(2) << 20;
constexpr int kRounds = 15;
std::atomic<uint64_t> sink;  // takes results, so that no loop is left out

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Team {  // threads that start together
 public:
  explicit Team(int size) : size_(size) {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    sched_getaffinity(0, sizeof(allowed), &allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
      if (CPU_ISSET(cpu, &allowed)) cpus_.push_back(cpu);
  }

  // Seconds from the first start to the last end of work(thread), in the best of the rounds.
  double best_s(int rounds, const std::function<void(int)>& work) {
    std::vector<double> begins(size_ * rounds), ends(size_ * rounds);
    std::vector<std::thread> threads;
    arrived_ = 0;
    for (int thread = 0; thread < size_; thread++)
      threads.emplace_back([&, thread] {
        bind(thread);
        for (int round = 0; round < rounds; round++) {
          for (arrived_++; arrived_ < size_ * (round + 1);) std::this_thread::yield();
          begins[round * size_ + thread] = now_s();
          work(thread);
          ends[round * size_ + thread] = now_s();
        }
      });
    for (std::thread& thread : threads) thread.join();
    double best = 1e300;
    for (int round = 0; round < rounds; round++) {
      const auto first = round * size_, last = first + size_;
      best = std::min(best, *std::max_element(ends.begin() + first, ends.begin() + last) -
                                *std::min_element(begins.begin() + first, begins.begin() + last));
    }
    return best;
  }

  int size() const { return size_; }

 private:
  void bind(int thread) {
    if (cpus_.empty()) return;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpus_[thread % cpus_.size()], &one);
    pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
  }

  int size_;
  std::vector<int> cpus_;
  std::atomic<int> arrived_;
};

// Reads `bytes` as `Lanes` pieces side by side, as a matrix product reads rows.
template <int Lanes>
uint64_t read_all(const char* data, size_t bytes, size_t ahead) {
  Words sums[Lanes] = {};
  const size_t piece = bytes / Lanes;
  for (size_t at = 0; at < piece; at += sizeof(Words))
    for (int lane = 0; lane < Lanes; lane++) {
      const char* line = data + lane * piece + at;
      if (ahead) __builtin_prefetch(line + ahead);
      sums[lane] += *reinterpret_cast<const Words*>(line);
    }
  uint64_t total = 0;
  for (const Words& sum : sums)
    for (int i = 0; i < 8; i++) total += sum[i];
  return total;
}

double stream_gb_s(Team& team) {
  const size_t mapped = kBufferBytes + 2 * kHugePage;  // prefetching may run over the end
  std::vector<char*> raw(team.size()), data(team.size());
  const auto map = [&](int thread) {  // by the thread that reads it: its memory is near
    void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      std::perror("mmap");
      std::exit(1);
    }
    raw[thread] = static_cast<char*>(memory);
    data[thread] = raw[thread] + (kHugePage - reinterpret_cast<uintptr_t>(memory) % kHugePage) % kHugePage;
#if defined(MADV_HUGEPAGE)
    madvise(raw[thread], mapped, MADV_HUGEPAGE);
#endif
    for (size_t at = 0; at < kBufferBytes; at++) data[thread][at] = char(at * 7);
  };
  team.best_s(1, map);
  double best = 1e300;
  for (const size_t ahead : {size_t(0), size_t(4096)}) {
    const auto time = [&](auto read) {
      const auto work = [&](int thread) { sink += read(data[thread], kBufferBytes, ahead); };
      best = std::min(best, team.best_s(kRounds, work));
    };
    time(read_all<1>);
    time(read_all<2>);
    time(read_all<4>);
  }
  for (char* memory : raw) munmap(memory, mapped);
  return team.size() * double(kBufferBytes) / best / 1e9;
}

double gflop_s(Team& team, double flops_a_thread, const std::function<void(int)>& work) {
  return team.size() * flops_a_thread / team.best_s(kRounds, work) / 1e9;
}

double fp32_gflop_s(Team& team) {
  constexpr long kSteps = 2000000;
  constexpr int kWidth = kVectorBytes / sizeof(float);
  return gflop_s(team, 2.0 * kSteps * kChains * kWidth, [](int thread) {
    Floats chains[kChains], factor, addend;
    for (int i = 0; i < kWidth; i++) factor[i] = 0.5f + thread * 1e-3f, addend[i] = 0.25f;
    for (Floats& chain : chains) chain = addend;
    for (long step = 0; step < kSteps; step++)
      for (Floats& chain : chains) chain = chain * factor + addend;  // one fused instruction where there is one
    float total = 0;
    for (const Floats& chain : chains)
      for (int i = 0; i < kWidth; i++) total += chain[i];
    sink += uint64_t(total);
  });
}

#if defined(__AVX512BF16__)
double avx512_bf16_gflop_s(Team& team) {
  constexpr long kSteps = 2000000;
  return gflop_s(team, 2.0 * kSteps * kChains * 32, [](int thread) {
    __m512 chains[kChains];
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(short(0x3f80 + thread));
    for (__m512& chain : chains) chain = _mm512_setzero_ps();
    for (long step = 0; step < kSteps; step++)
      for (__m512& chain : chains) chain = _mm512_dpbf16_ps(chain, ones, ones);
    float total = 0, lanes[16];
    for (const __m512& chain : chains) {
      _mm512_storeu_ps(lanes, chain);
      for (const float lane : lanes) total += lane;
    }
    sink += uint64_t(total);
  });
}
#endif

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
struct alignas(64) Tiles {  // the operand of ldtilecfg, 64 bytes
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(Tiles) == 64);

double amx_bf16_gflop_s(Team& team) {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return 0;
  constexpr long kSteps = 500000;
  return gflop_s(team, 2.0 * kSteps * 4 * 16 * 16 * 32, [](int) {
    alignas(64) uint16_t operands[4][16 * 32];
    for (auto& operand : operands) std::fill(std::begin(operand), std::end(operand), uint16_t(0x3f80));  // 1.0
    const Tiles tiles;
    _tile_loadconfig(&tiles);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long step = 0; step < kSteps; step++) {  // two by two: four products for four loads, as a kernel does
      _tile_loadd(4, operands[0], 64);
      _tile_loadd(5, operands[1], 64);
      _tile_loadd(6, operands[2], 64);
      _tile_loadd(7, operands[3], 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    alignas(64) uint32_t result[16 * 16];
    _tile_stored(0, result, 64);
    _tile_release();
    sink += result[0];
  });
}
#endif

int main(int count, char** arguments) {
  const int threads = count > 1 ? std::atoi(arguments[1]) : 1;
  if (threads < 1) {
    std::fprintf(stderr, "usage: probe THREADS\n");
    return 2;
  }
  Team team(threads);
  std::printf("{\"stream_gb_s\": %.2f", stream_gb_s(team));
  std::printf(", \"fp32_gflop_s\": %.1f", fp32_gflop_s(team));
#if defined(__AVX512BF16__)
  std::printf(", \"avx512_bf16_gflop_s\": %.1f", avx512_bf16_gflop_s(team));
#endif
#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
  std::printf(", \"amx_bf16_gflop_s\": %.1f", amx_bf16_gflop_s(team));
#endif
  std::printf("}\n");
}
