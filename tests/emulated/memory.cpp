// Device and pinned memory: one file in memory, mapped twice. Kernels use the second mapping; in the first one the
// host may not touch device memory at all, nor pinned memory that a device is using.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <list>
#include <set>
#include <utility>

#include "streams.h"

namespace emulated {
namespace {
const size_t TOTAL = (size_t)setting("MEMORY_MB", 8192) << 20;  // of each device
const size_t ADDRESSES = size_t(1) << 40;  // for each device, and for pinned memory; none is used twice
const bool POISON = setting("POISON", 1);
const size_t PAGE = 4096;

struct sigaction before;
void on_fault(int signal, siginfo_t*, void*);

struct Arena {
  char *own, *alias;
  size_t size = ADDRESSES * (device_count() + 1);
  int file = memfd_create("emulated_cuda", MFD_CLOEXEC);
  Arena() {
    TORCH_CHECK(file >= 0 && !ftruncate(file, size));
    own = (char*)mmap(nullptr, size, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    alias = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(own != MAP_FAILED && alias != MAP_FAILED, "emulated CUDA: no address space");
    struct sigaction action{};
    action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before);
  }
  static Arena& one() { static auto* it = new Arena; return *it; }
  bool has(const void* p) { return p >= own && p < own + size; }
  char* device(int d) { return own + ADDRESSES * d; }
  char* pinned() { return device(device_count()); }
  void drop(char* p, size_t n) { fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, p - own, n); }
};

void on_fault(int signal, siginfo_t* info, void*) {
  auto p = (char*)info->si_addr;
  const char* text = !Arena::one().has(p) ? "" : p >= Arena::one().pinned()
      ? "emulated CUDA: the host touches pinned memory that a device still uses\n"
      : "emulated CUDA: the host touches device memory\n";
  auto written = write(2, text, strlen(text));
  if (const char* path = std::getenv("EMULATED_CUDA_PROBLEMS"); path && *text) {
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT, 0644);
    written += write(file, text, strlen(text));
  }
  (void)written, sigaction(signal, &before, nullptr);  // which is called next, as the fault comes again
}

// ---- Device memory: free blocks are kept, and used again at once by the stream that had them ---------

struct Block {
  size_t size;
  c10::Stream stream;
  std::set<c10::StreamId> others;  // by record_stream
};
c10::Stream sibling(c10::Stream s, c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, s.device(), id); }

struct Memory final : c10::DeviceAllocator {
  std::mutex mutex;
  std::map<char*, Block> used;
  std::map<std::pair<int, c10::StreamId>, std::multimap<size_t, char*>> free;
  struct Late { char* p; Block block; std::vector<EventPtr> events; };
  std::list<Late> late;  // freed while other streams use it
  std::vector<c10::CachingDeviceAllocator::DeviceStats> stats{(size_t)device_count()};
  std::vector<char*> next{(size_t)device_count()};

  static Memory& one() { static auto* it = new Memory; return *it; }
  static void count(c10::CachingAllocator::StatArray& of, long n) { n > 0 ? of[0].increase(n) : of[0].decrease(-n); }
  size_t reserved(int d) { return stats[d].reserved_bytes[0].current; }
  auto& cached(c10::Stream s) { return free[{s.device_index(), s.id()}]; }

  char* take(c10::Stream s, size_t& size) {
    late.remove_if([&](Late& each) {
      for (auto& event : each.events) if (!event->done) return false;
      return cached(each.block.stream).emplace(each.block.size, each.p), true;
    });
    auto& mine = cached(s);
    auto found = mine.lower_bound(size);
    if (found == mine.end() || found->first > 2 * size) return nullptr;
    auto p = found->second;
    size = found->first, mine.erase(found);
    return p;
  }
  char* reserve(int d, size_t size) {
    auto& st = stats[d];
    if (!next[d]) next[d] = Arena::one().device(d);  // not before: a fork would share it
    if (reserved(d) + size > TOTAL) release(d);
    const bool fits = reserved(d) + size <= TOTAL;
    if (!fits) st.num_ooms++;
    TORCH_CHECK_WITH(OutOfMemoryError, fits, "CUDA out of memory. Tried to allocate ", size, " bytes. GPU ", d, " has a total capacity of ",
                     TOTAL, " bytes of which ", TOTAL - reserved(d), " bytes is free.");
    count(st.reserved_bytes, size), count(st.segment, 1), st.num_device_alloc++;
    return std::exchange(next[d], next[d] + size);
  }
  c10::DataPtr allocate(size_t n) override {
    at::Device device(at::kCUDA, current_device());
    if (!n) return {nullptr, nullptr, &done_with, device};
    size_t size = (n + 511) / 512 * 512;
    auto s = current_stream();
    char* p;
    {
      std::lock_guard lock(mutex);
      p = take(s, size);
      if (!p) p = reserve(device.index(), size);
      used.emplace(p, Block{size, s, {}});
      auto& st = stats[device.index()];
      for (auto each : {&st.allocated_bytes, &st.active_bytes}) count(*each, size);
      count(st.requested_bytes, n), count(st.allocation, 1), count(st.active, 1);
    }
    TRACE(memory_allocation, (uintptr_t)p);
    if (POISON) enqueue(s, "an allocation", {{(uintptr_t)p, (uintptr_t)p + size, true}}, [to = visible(p), size] { memset(to, 0xFF, size); return true; });
    return {p, p, &done_with, device};
  }
  static void done_with(void* p) { if (p) one().gone((char*)p); }
  void gone(char* p) {
    TRACE(memory_deallocation, (uintptr_t)p);
    auto block = [&] { std::lock_guard lock(mutex); return used.at(p); }();
    std::vector<c10::Stream> others;
    std::vector<EventPtr> events;
    for (auto id : block.others) others.push_back(sibling(block.stream, id)), events.push_back(record(others.back()));
    is_freed(p, block.size, block.stream, others);
    std::lock_guard lock(mutex);
    used.erase(p);
    auto& st = stats[block.stream.device_index()];
    for (auto each : {&st.allocated_bytes, &st.active_bytes}) count(*each, -(long)block.size);
    count(st.allocation, -1), count(st.active, -1);
    if (events.empty()) cached(block.stream).emplace(block.size, p);
    else late.push_back({p, block, events});
  }
  void release(int d) {  // the device is idle: as cudaFree, the caller has waited for it
    for (auto& [stream, blocks] : free) if (stream.first == d) {
      for (auto [size, p] : blocks) {
        count(stats[d].reserved_bytes, -(long)size), count(stats[d].segment, -1);
        Arena::one().drop(p, size);
      }
      blocks.clear();
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return &done_with; }
  void copy_data(void* to, const void* from, size_t n) const override { synchronize(); memcpy(visible(to), visible(from), n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { synchronize(); std::lock_guard lock(mutex); release(current_device()); }
  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    std::lock_guard lock(mutex);
    auto found = used.find((char*)p.get());
    if (found != used.end() && found->second.stream != s) found->second.others.insert(s.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override { std::lock_guard lock(mutex); return stats[d]; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex d) override {
    std::lock_guard lock(mutex);
    auto& st = stats[d];
    for (auto each : {&st.allocated_bytes, &st.active_bytes, &st.reserved_bytes, &st.requested_bytes, &st.allocation, &st.segment, &st.active})
      (*each)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override { return {TOTAL - reserved(d), TOTAL}; }
};

// ---- Pinned memory ------------------------------------------------------------------------------

struct Use { Range range; Moment by; };  // by a device; the host may not know its end yet

struct Pinned final : at::HostAllocator {
  std::mutex mutex;  // innermost: nothing else is locked under it
  std::map<char*, size_t> blocks, freed;
  std::vector<Use> uses;
  char* next = nullptr;
  static Pinned& one() { static auto* it = new Pinned; return *it; }
  static size_t paged(size_t n) { return (n + PAGE - 1) / PAGE * PAGE; }
  c10::DataPtr allocate(size_t n) override {
    auto now = finished();
    std::lock_guard lock(mutex);
    if (!next) next = Arena::one().pinned();  // not before: a fork would share it
    for (auto it = freed.begin(); it != freed.end();) {
      auto [p, size] = *it;
      bool in_use = std::any_of(uses.begin(), uses.end(), [&, p = p, size = size](Use& use) {
        return use.range.begin < (uintptr_t)p + size && use.range.end > (uintptr_t)p && !use.by.is_before(now);
      });
      if (in_use) { ++it; continue; }
      std::erase_if(uses, [&, p = p, size = size](Use& use) { return use.range.begin < (uintptr_t)p + size && use.range.end > (uintptr_t)p; });
      Arena::one().drop(p, paged(size)), mprotect(p, paged(size), PROT_NONE), it = freed.erase(it);
    }
    char* p = std::exchange(next, next + paged(std::max<size_t>(n, 1)));
    TORCH_CHECK(!mprotect(p, paged(n), PROT_READ | PROT_WRITE), "CUDA error: out of pinned memory");
    blocks[p] = std::max<size_t>(n, 1);
    return {p, p, &done_with, at::kCPU};
  }
  static void done_with(void* p) {
    std::lock_guard lock(one().mutex);
    one().freed.insert(one().blocks.extract((char*)p));
  }
  bool has(const void* p) {
    std::lock_guard lock(mutex);
    auto after = blocks.upper_bound((char*)p);
    return after != blocks.begin() && p < std::prev(after)->first + std::prev(after)->second;
  }
  void guard(const Range& range, const Moment& by) {
    std::lock_guard lock(mutex);
    if (!next || range.begin < (uintptr_t)Arena::one().pinned() || range.begin >= (uintptr_t)Arena::one().own + Arena::one().size) return;
    uses.push_back({range, by});
    protect(range);
  }
  void release(const Clock& host) {
    std::lock_guard lock(mutex);
    std::vector<Range> over;
    std::erase_if(uses, [&](Use& use) {
      if (use.by.is_before(host)) over.push_back(use.range);
      return use.by.is_before(host);
    });
    for (auto& range : over) protect(range);
  }
  // Pages that other tensors of the block share stay open, but for the last: nothing follows there.
  void protect(const Range& range) {
    auto after = blocks.upper_bound((char*)range.begin);
    if (after == blocks.begin()) return;
    auto [p, size] = *std::prev(after);
    auto begin = paged(range.begin), end = range.end >= (uintptr_t)p + size ? paged(range.end) : range.end / PAGE * PAGE;
    for (auto page = begin; page < end; page += PAGE) {
      int access = PROT_READ | PROT_WRITE;
      for (auto& use : uses)
        if (use.range.begin < page + PAGE && use.range.end > page) access = use.range.writes ? PROT_NONE : access & PROT_READ;
      mprotect((void*)page, PAGE, access);
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return &done_with; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

// ---- Random numbers: each kernel gets a generator of its own when it is launched ----------------

struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(int d) {
    device_ = at::Device(at::kCUDA, d < 0 ? current_device() : d);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
  DeviceGenerator* clone_impl() const override {
    auto other = new DeviceGenerator(device_.index());
    other->set_state(*at::CPUGeneratorImpl::get_state());
    return other;
  }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return emulated::device_count(); }
  c10::DeviceIndex deviceCount() const override { return emulated::device_count(); }
  c10::DeviceIndex current_device() const override { return emulated::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return emulated::current_device(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_current_device(d); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { auto was = current_device(); set_current_device(d); return was; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &Pinned::one(); }
  at::Allocator* getCUDADeviceAllocator() const override { return &Memory::one(); }
  at::Device getDeviceFromPtr(void* p) const override {
    return {at::kCUDA, Arena::one().has(p) ? c10::DeviceIndex(((char*)p - Arena::one().own) / ADDRESSES) : current_device()};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override { return at::make_generator<DeviceGenerator>(d); }
  void deviceSynchronize(c10::DeviceIndex) const override { synchronize(); }
  std::string showConfig() const override { return "emulated CUDA"; }
};
}  // namespace

const at::Generator& generator(int d) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < device_count(); i++) made->push_back(at::make_generator<DeviceGenerator>(i));
    return made;
  }();
  return (*all)[d < 0 ? current_device() : d];
}
void* visible(const void* p) { return Arena::one().has(p) ? (char*)p - Arena::one().own + Arena::one().alias : (void*)p; }
c10::Allocator& device_memory() { return Memory::one(); }
bool is_pinned(const void* p) { return p && Pinned::one().has(p); }
void guard_pinned(const Range& range, const Moment& by) { if (range.begin != range.end) Pinned::one().guard(range, by); }
void release_pinned(const Clock& host) { Pinned::one().release(host); }
void record_stream(const c10::DataPtr& p, c10::Stream s) { Memory::one().recordStream(p, s); }
void empty_cache() { Memory::one().emptyCache({0, 0}); }
std::pair<size_t, size_t> memory_info(int d) { return Memory::one().getMemoryInfo(d < 0 ? current_device() : d); }
std::vector<std::tuple<int, long, size_t, long, bool>> memory_blocks() {
  auto& memory = Memory::one();
  std::lock_guard lock(memory.mutex);
  std::vector<std::tuple<int, long, size_t, long, bool>> all;
  for (auto& [p, block] : memory.used) all.emplace_back(block.stream.device_index(), (long)p, block.size, block.stream.id(), true);
  for (auto& [stream, blocks] : memory.free) for (auto [size, p] : blocks) all.emplace_back(stream.first, (long)p, size, stream.second, false);
  return all;
}
void install_hooks() {
  // torch has asked for its hooks already; they have no members, so they can become others.
  *(void**)&const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks()) = *(void**)new Hooks;
  c10::SetAllocator(at::kCUDA, &Memory::one(), 1);
  at::setHostAllocator(at::kCUDA, &Pinned::one(), 1);
}
}  // namespace emulated
