// A process group "nccl" over gloo: collectives run on a stream of their own, which waits for the current one;
// `wait` lets the current stream wait, not the host.
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

#include <future>
#include <iostream>
#include <map>

#include "streams.h"

namespace {
using namespace emulated;
using at::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

Tensors on_host(const Tensors& all) { Tensors r; for (auto& t : all) r.push_back(emulated::on_host(t)); return r; }
std::vector<Tensors> on_host(const std::vector<Tensors>& all) { std::vector<Tensors> r; for (auto& t : all) r.push_back(on_host(t)); return r; }
Tensors flat(const std::vector<Tensors>& lists) { Tensors r; for (auto& l : lists) r.insert(r.end(), l.begin(), l.end()); return r; }

struct StreamWork : c10d::Work {
  EventPtr done;
  Tensors kept;  // until somebody waits
  Tensors results;
  bool blocks_host = false;
  int device = 0;
  bool isCompleted() override { return query(done); }
  bool isSuccess() const override { return done->done; }
  void synchronize() override {
    block(current_stream(device), done), kept.clear();
    if (blocks_host) emulated::synchronize(done);
  }
  bool wait(std::chrono::milliseconds) override { synchronize(); return true; }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<at::Device>{at::Device(at::kCUDA, device)});
    synchronize();
    future->markCompleted(at::IValue(results));
    return future;
  }
};

struct Nccl : c10d::Backend {
  struct Options : c10d::Backend::Options {
    bool is_high_priority_stream = false;
    c10::intrusive_ptr<Nccl> split_from;
    int split_color = 0;
    Options() : c10d::Backend::Options("nccl", std::chrono::minutes(10)) {}
  };
  BackendPtr gloo;
  c10::intrusive_ptr<Options> options;
  std::map<int, c10::Stream> streams;
  std::vector<WorkPtr> together;
  bool coalesces = false;
  static inline std::vector<size_t> groups;  // the operations of each, in this process

  Nccl(BackendPtr gloo, c10::intrusive_ptr<Options> options)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)), options(std::move(options)) {
    if (this->options->split_from) this->options->split_from->take_part_in_split(), this->options->split_from.reset();
  }
  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options; }
  void setTimeout(std::chrono::milliseconds t) override { options->timeout = t; }
  bool supportsSplitting() const override { return true; }
  void take_part_in_split() { gloo->barrier()->wait(); }  // all ranks of the communicator that is split
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalesces = true; together.clear(); }
  WorkPtr endCoalescing() override { coalesces = false; groups.push_back(together.size()); return together.empty() ? nullptr : together.back(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  // `begin` starts gloo's work on what kernels see of the tensors, once the stream gets there. As NCCL's watchdog
  // does, a work that takes longer than the time-out ends the process.
  WorkPtr start(const std::string& op, const Tensors& reads, const Tensors& writes, std::function<WorkPtr()> begin, std::function<void()> finish = nullptr) {
    Tensors tensors = reads;
    tensors.insert(tensors.end(), writes.begin(), writes.end());
    std::vector<Range> memory;
    for (auto& t : tensors) {
      TORCH_CHECK_VALUE(t.is_cuda() && t.is_non_overlapping_and_dense(), "Tensors must be CUDA and dense");
      TORCH_CHECK(t.device() == tensors[0].device(), "tensors of one collective on several devices");
      TORCH_CHECK(!getBoundDeviceId() || *getBoundDeviceId() == t.device(), "Tensor found on device ", t.device(), " but backend constrained to ", *getBoundDeviceId());
    }
    for (auto& t : reads) for (auto& range : ranges_of(t, false)) memory.push_back(range);
    for (auto& t : writes) for (auto& range : ranges_of(t, true)) memory.push_back(range);
    int device = tensors.empty() ? current_stream().device_index() : tensors[0].device().index();
    auto stream = streams.try_emplace(device, new_stream(device)).first->second;
    block(stream, record(current_stream(device)));
    struct Running { std::future<void> end; Time::time_point began = Time::now(); };
    auto running = std::make_shared<Running>();
    enqueue(stream, op, memory, [op, begin = std::move(begin), finish = std::move(finish), running, limit = options->timeout]() {
      // On a thread of its own, as some of gloo's works end in `wait`.
      if (!running->end.valid()) running->began = Time::now(), running->end = std::async(std::launch::async, [begin] { begin()->wait(); });
      if (running->end.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
        if (Time::now() - running->began < limit) return false;
        std::cerr << "Watchdog caught collective operation timeout: " << op << std::endl;
        std::abort();
      }
      running->end.get();
      if (finish) finish();
      return true;
    });
    auto work = c10::make_intrusive<StreamWork>();
    work->done = record(stream), work->kept = work->results = tensors, work->device = device;
    if (coalesces) together.push_back(work);
    return work;
  }
  static std::function<void()> average(c10d::ReduceOp& op, Tensors over, int size) {
    if (op != c10d::ReduceOp::AVG) return nullptr;
    op = c10d::ReduceOp::SUM;
    return [over, size] { for (auto& t : over) t.div_(size); };
  }
  // The last of several works; it keeps the tensors of all.
  template <class F> static WorkPtr each(size_t count, const Tensors& kept, F one) {
    WorkPtr last;
    for (size_t i = 0; i < count; i++) last = one(i);
    static_cast<StreamWork*>(last.get())->kept = kept;
    return last;
  }

  WorkPtr broadcast(Tensors& ts, const c10d::BroadcastOptions& o) override {
    bool sends = rank_ == o.rootRank;
    return start("nccl broadcast", sends ? ts : Tensors(), sends ? Tensors() : ts, [g = gloo, h = on_host(ts), o]() mutable { return g->broadcast(h, o); });
  }
  WorkPtr allreduce(Tensors& ts, const c10d::AllreduceOptions& given) override {
    auto o = given;
    auto h = on_host(ts);
    auto end = average(o.reduceOp, h, size_);
    return start("nccl all_reduce", {}, ts, [g = gloo, h, o]() mutable { return g->allreduce(h, o); }, end);
  }
  WorkPtr reduce(Tensors& ts, const c10d::ReduceOptions& given) override {
    auto o = given;
    bool receives = rank_ == o.rootRank;
    auto h = on_host(ts);
    auto end = average(o.reduceOp, receives ? h : Tensors(), size_);
    auto begin = [g = gloo, h, o, receives]() mutable {
      Tensors used;  // gloo's reduce leaves its sums everywhere
      for (auto& t : h) used.push_back(receives ? t : t.clone());
      return g->reduce(used, o);
    };
    return start("nccl reduce", receives ? Tensors() : ts, receives ? ts : Tensors(), begin, end);
  }
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    return start("nccl all_gather", ins, flat(outs), [g = gloo, a = on_host(outs), b = on_host(ins), o]() mutable { return g->allgather(a, b, o); });
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    TORCH_CHECK_VALUE(out.numel() == in.numel() * size_, "output tensor size must be equal to world_size times input tensor size");
    TORCH_CHECK_TYPE(out.dtype() == in.dtype(), "output tensor must have the same type as input tensor");
    return start("nccl all_gather", {in}, {out}, [g = gloo, a = emulated::on_host(out), b = emulated::on_host(in), o]() mutable { return g->_allgather_base(a, b, o); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    return each(outs.size(), flat({outs, ins}), [&](size_t i) { return _allgather_base(outs[i], ins[i], o); });
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& given) override {
    TORCH_CHECK_VALUE(in.numel() == out.numel() * size_, "input tensor must be the same size as output size times world size");
    TORCH_CHECK_TYPE(out.dtype() == in.dtype(), "input tensor must be the same type as the output tensor.");
    auto o = given;
    auto a = emulated::on_host(out);
    auto end = average(o.reduceOp, {a}, size_);
    return start("nccl reduce_scatter", {in}, {out}, [g = gloo, a, b = emulated::on_host(in), o]() mutable { return g->_reduce_scatter_base(a, b, o); }, end);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& o) override {
    return each(outs.size(), flat({outs, ins}), [&](size_t i) { return _reduce_scatter_base(outs[i], ins[i], o); });
  }
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& to, std::vector<int64_t>& from, const c10d::AllToAllOptions& o) override {
    return start("nccl all_to_all", {in}, {out}, [g = gloo, a = emulated::on_host(out), b = emulated::on_host(in), to, from, o]() mutable { return g->alltoall_base(a, b, to, from, o); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    auto work = start("nccl barrier", {}, {}, [g = gloo] { return g->barrier(); });
    static_cast<StreamWork*>(work.get())->blocks_host = true;
    return work;
  }
};

// What DDP times its steps with; by the host's clock here.
struct HostTimer : c10d::Timer {
  explicit HostTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto a = getTimeRef(start), b = getTimeRef(end);
    if (a == c10d::kUnsetTime || b == c10d::kUnsetTime) return {};
    return b - a;
  }
};
}  // namespace

void add_nccl(pybind11::module& m) {
  namespace py = pybind11;
  c10d::TimerRegistry()->Register(c10::kCUDA, [](c10::Device d) -> std::unique_ptr<c10d::Timer> { return std::make_unique<HostTimer>(d); }, c10::REGISTRY_PREFERRED);
  py::module::import("torch.distributed");
  auto made = py::class_<Nccl, c10::intrusive_ptr<Nccl>, c10d::Backend>(m, "ProcessGroupNCCL");
  py::class_<Nccl::Options, c10::intrusive_ptr<Nccl::Options>, c10d::Backend::Options>(made, "Options")
      .def(py::init([](bool) { return c10::make_intrusive<Nccl::Options>(); }), py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &Nccl::Options::is_high_priority_stream)
      .def_readwrite("split_from", &Nccl::Options::split_from)
      .def_readwrite("split_color", &Nccl::Options::split_color);
  made.def(py::init([](py::object store, int rank, int size, c10::intrusive_ptr<Nccl::Options> options) {
        auto dist = py::module::import("torch.distributed");
        auto gloo = dist.attr("ProcessGroupGloo")(dist.attr("PrefixStore")("nccl", store), rank, size, options->timeout);
        py::gil_scoped_release without_gil;
        return c10::make_intrusive<Nccl>(gloo.cast<BackendPtr>(), options);
      }))
      .def("perform_nocolor_split", [](Nccl& self, c10::Device) { self.take_part_in_split(); }, py::call_guard<py::gil_scoped_release>())
      .def("eager_connect_single_device", [](Nccl&, c10::Device) {})
      .def_static("groups", [] { return Nccl::groups; })
      .def_property_readonly("options", [](Nccl& self) { return self.options; });
}
