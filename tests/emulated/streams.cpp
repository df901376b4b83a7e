// Streams are queues of steps. One thread takes from them in a seeded order that respects streams and events
// alone; whether two steps are ordered is known when the later one is enqueued, whatever the order is.
#include "streams.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <fstream>
#include <iostream>
#include <optional>
#include <random>
#include <set>
#include <thread>

namespace emulated {

long setting(const char* name, long otherwise) {
  const char* found = std::getenv((std::string("EMULATED_CUDA_") + name).c_str());
  return found ? std::atol(found) : otherwise;
}

namespace {
const int DEVICES = setting("DEVICES", 2);
const bool EAGER = setting("EAGER", 0);
const auto LAG = std::chrono::microseconds(setting("LAG_US", 3000));

struct Queue {
  size_t number;
  std::string name;
  std::deque<Step> steps;
  uint64_t given = 0, done = 0;
  uint64_t rank = 0;  // the lowest that can go goes
  Clock clock;
  std::vector<Accesses::Conflict> freed;  // uses of memory that was freed, by others that it did not wait for
};

struct Executor {
  std::mutex mutex;
  std::condition_variable to_do, done;
  std::map<std::pair<int, long>, Queue> queues;
  std::mt19937_64 random{(uint64_t)setting("SEED", 0)};
  std::exception_ptr failure;
  Time::time_point last_given = Time::now();
  int waiting = 0;
  long until_shuffle = 0;
  pid_t pid = 0;
  Clock host;
  Accesses accesses;
  std::set<std::string> names;
  std::map<std::string, long> waits;
  std::vector<std::string> problems;

  Queue& queue(c10::Stream s) {
    auto [found, is_new] = queues.try_emplace({s.device_index(), s.id()});
    auto& q = found->second;
    if (is_new) {
      q.number = queues.size(), q.rank = random();
      q.name = "stream " + std::to_string(s.id()) + " of cuda:" + std::to_string(s.device_index());
    }
    return q;
  }
  const std::string& name_of(size_t number) {
    for (auto& [_, q] : queues) if (q.number == number) return q.name;
    return *names.insert("no stream").first;
  }
  void problem(const std::string& text) {
    problems.push_back(text);
    std::cerr << "emulated CUDA: " << text << std::endl;
    if (const char* path = std::getenv("EMULATED_CUDA_PROBLEMS")) std::ofstream(path, std::ios::app) << text << std::endl;
  }
  std::string conflict(const std::string& now, const Accesses::Conflict& with) {
    return now + ", not ordered after " + *with.earlier.op + " on " + name_of(with.earlier.stream) + (with.wrote ? " wrote it" : " read it");
  }
  void enqueue(c10::Stream s, const std::string& op, const std::vector<Range>& memory, Step step) {
    std::unique_lock lock(mutex);
    if (!pid) pid = getpid(), std::thread([this] { run(); }).detach();
    TORCH_CHECK(pid == getpid(), "Cannot re-initialize CUDA in forked subprocess.");
    auto& q = queue(s);
    q.clock.merge(host);
    Moment now{q.number, ++q.given, &*names.insert(op).first};
    q.clock.advance(now.stream, now.time);
    std::string found;
    for (auto& range : memory) {
      for (auto& other : accesses.add(range, now, q.clock))
        found = conflict("race: " + op + " on " + q.name + (range.writes ? " writes memory" : " reads memory"), other);
      guard_pinned(range, now);
    }
    if (!memory.empty()) check_freed(q);
    q.steps.push_back(std::move(step));
    last_given = Time::now();
    to_do.notify_one();
    if (!found.empty()) problem(found);
    lock.unlock();
    TORCH_CHECK(found.empty(), found);
    if (EAGER) synchronize(s);
  }
  void is_freed(const Range& range, c10::Stream owner, const std::vector<c10::Stream>& others) {
    std::lock_guard lock(mutex);
    auto& q = queue(owner);
    auto clock = q.clock;
    clock.merge(host);
    for (auto& other : others) clock.merge(queue(other).clock);
    for (auto& each : accesses.unordered(range, clock)) q.freed.push_back(each);
    accesses.forget(range.begin, range.end);
  }
  // The stream may use again what it had: other streams must be done with it.
  void check_freed(Queue& q) {
    for (auto& each : q.freed)
      if (!each.earlier.is_before(q.clock)) problem(conflict("memory of " + q.name + " is freed too early", each));
    q.freed.clear();
  }
  // Have the host wait; after that it is ordered after `clock`.
  template <class F> void wait(std::unique_lock<std::mutex>& lock, const Clock& clock, F ready) {
    waiting++, to_do.notify_one();
    done.wait(lock, [&] { return failure || ready(); });
    waiting--;
    if (failure) std::rethrow_exception(failure);
    host_knows(clock);
  }
  void host_knows(const Clock& clock) { host.merge(clock), release_pinned(host); }
  template <class F> void synchronize(F until) {
    std::optional<pybind11::gil_scoped_release> without_gil;
    if (PyGILState_Check()) without_gil.emplace();
    std::unique_lock lock(mutex);
    until(lock);
  }
  void synchronize(c10::Stream s) {
    synchronize([&](auto& lock) {
      auto& q = queue(s);
      wait(lock, Clock(q.clock), [&q, upto = q.given] { return q.done >= upto; });
    });
  }
  void synchronize() {
    synchronize([&](auto& lock) {
      Clock clock;
      std::map<Queue*, uint64_t> upto;
      for (auto& [_, q] : queues) clock.merge(q.clock), upto[&q] = q.given;
      wait(lock, clock, [&] { return std::all_of(upto.begin(), upto.end(), [](auto& each) { return each.first->done >= each.second; }); });
    });
  }
  template <class F> bool poll(F is_done, const Clock& clock) {
    last_given = Time::now() - LAG, to_do.notify_one();
    if (is_done()) host_knows(clock);
    return is_done();
  }
  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      std::vector<Queue*> open;
      for (auto& [_, q] : queues) if (!q.steps.empty()) open.push_back(&q);
      if (open.empty() || failure) { to_do.wait(lock); continue; }
      if (!EAGER && !waiting && Time::now() - last_given < LAG) { to_do.wait_for(lock, LAG / 4); continue; }
      if (until_shuffle-- <= 0) {
        for (auto& [_, q] : queues) q.rank = random();
        until_shuffle = 1 + random() % 100;
      }
      std::sort(open.begin(), open.end(), [](auto a, auto b) { return a->rank < b->rank; });
      bool any = std::any_of(open.begin(), open.end(), [&](Queue* q) { return advance(lock, *q); });
      done.notify_all();
      if (!any && !failure) to_do.wait_for(lock, std::chrono::microseconds(50));
    }
  }
  bool advance(std::unique_lock<std::mutex>& lock, Queue& q) {
    Step& step = q.steps.front();  // it stays there: only this thread takes away
    bool finished = false;
    std::exception_ptr thrown;
    lock.unlock();
    try { finished = step(); } catch (...) { thrown = std::current_exception(); }
    lock.lock();
    if (thrown) failure = thrown;
    if (thrown || !finished) return thrown != nullptr;
    Step gone = std::move(q.steps.front());
    q.steps.pop_front(), q.done++;
    lock.unlock(), gone = nullptr, lock.lock();
    return true;
  }
};
Executor& executor() { static auto* one = new Executor; return *one; }

thread_local int device_now = 0;
thread_local std::map<int, long> streams_now;
std::atomic<long> stream_ids{1};
c10::Stream stream(int device, long id) { return c10::Stream(c10::Stream::UNSAFE, {at::kCUDA, (c10::DeviceIndex)device}, id); }
}  // namespace

int sync_debug_mode = 0;
int device_count() { return DEVICES; }
int current_device() { return device_now; }
void set_current_device(int d) {
  TORCH_CHECK(d < DEVICES, "CUDA error: invalid device ordinal");
  if (d >= 0) device_now = d;
}
c10::Stream current_stream(int d) { if (d < 0) d = device_now; return stream(d, streams_now[d]); }
void set_current_stream(c10::Stream s) { streams_now[s.device_index()] = s.id(); }
c10::Stream new_stream(int d) {
  auto made = stream(d < 0 ? device_now : d, stream_ids++);
  TRACE(stream_creation, made.id());
  return made;
}

void enqueue(c10::Stream s, const std::string& op, const std::vector<Range>& memory, Step step) { executor().enqueue(s, op, memory, std::move(step)); }
EventPtr record(c10::Stream s) {
  auto event = std::make_shared<Event>();
  enqueue(s, "an event", {}, [event] { event->when = Time::now(), event->done = true; return true; });
  {
    std::lock_guard lock(executor().mutex);
    event->clock = executor().queue(s).clock;
  }
  TRACE(event_creation, (uintptr_t)event.get());
  TRACE(event_record, (uintptr_t)event.get(), s.id());
  return event;
}
void block(c10::Stream s, const EventPtr& event) {
  enqueue(s, "a wait", {}, [event] { return event->done.load(); });
  TRACE(event_wait, (uintptr_t)event.get(), s.id());
  std::lock_guard lock(executor().mutex);
  executor().queue(s).clock.merge(event->clock);
}
bool query(const EventPtr& event) {
  std::lock_guard lock(executor().mutex);
  return executor().poll([&] { return event->done.load(); }, event->clock);
}
void synchronize(const EventPtr& event) {
  TRACE(event_synchronization, (uintptr_t)event.get());
  executor().synchronize([&](auto& lock) { executor().wait(lock, event->clock, [&] { return event->done.load(); }); });
}
void synchronize(c10::Stream s) {
  TRACE(stream_synchronization, s.id());
  executor().synchronize(s);
}
void synchronize() {
  TRACE(device_synchronization);
  executor().synchronize();
}
bool is_idle(c10::Stream s) {
  std::lock_guard lock(executor().mutex);
  auto& q = executor().queue(s);
  return executor().poll([&] { return q.steps.empty(); }, Clock(q.clock));
}
void implicit_wait(const std::string& op) {
  { std::lock_guard lock(executor().mutex); executor().waits[op]++; }
  TORCH_CHECK(sync_debug_mode < 2, "called a synchronizing CUDA operation: ", op);
  if (sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation: ", op);
  synchronize(current_stream());
}
std::map<std::string, long> implicit_waits() { std::lock_guard lock(executor().mutex); return executor().waits; }
Clock finished() {
  std::lock_guard lock(executor().mutex);
  Clock clock;
  for (auto& [_, q] : executor().queues) clock.advance(q.number, q.done);
  return clock;
}
std::vector<std::string> problems() { std::lock_guard lock(executor().mutex); return executor().problems; }
void is_freed(void* p, size_t n, c10::Stream owner, const std::vector<c10::Stream>& others) {
  executor().is_freed({(uintptr_t)p, (uintptr_t)p + n, true}, owner, others);
}

namespace {
struct Guard final : c10::impl::DeviceGuardImplInterface {
  at::DeviceType type() const override { return at::kCUDA; }
  at::Device getDevice() const override { return {at::kCUDA, (c10::DeviceIndex)device_now}; }
  void setDevice(at::Device d) const override { set_current_device(d.index()); }
  void uncheckedSetDevice(at::Device d) const noexcept override { if (d.index() >= 0) device_now = d.index(); }
  at::Device exchangeDevice(at::Device d) const override { auto was = getDevice(); setDevice(d); return was; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Stream getStream(at::Device d) const override { return current_stream(d.index()); }
  c10::Stream getDefaultStream(at::Device d) const override { return stream(d.index() < 0 ? device_now : d.index(), 0); }
  c10::Stream getNewStream(at::Device d, int) const override { return new_stream(d.index()); }
  c10::Stream getStreamFromGlobalPool(at::Device d, bool) const override { return new_stream(d.index()); }
  c10::Stream exchangeStream(c10::Stream s) const override { auto was = current_stream(s.device_index()); set_current_stream(s); return was; }
  void* getStreamNativeHandle(const c10::Stream s) const override { return (void*)s.id(); }
  bool queryStream(const c10::Stream& s) const override { return is_idle(s); }
  void synchronizeStream(const c10::Stream& s) const override { synchronize(s); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize(); }
  static EventPtr& at(void* event) { return *(EventPtr*)event; }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new EventPtr;
    at(*event) = emulated::record(s);
  }
  void block(void* event, const c10::Stream& s) const override { if (event) emulated::block(s, at(event)); }
  bool queryEvent(void* event) const override { return !event || query(at(event)); }
  void synchronizeEvent(void* event) const override { if (event) synchronize(at(event)); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (EventPtr*)event; }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    TORCH_CHECK(at(a)->done && at(b)->done, "CUDA error: device not ready");
    return std::chrono::duration<double, std::milli>(at(b)->when - at(a)->when).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override { record_stream(p, s); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}  // namespace
}  // namespace emulated
