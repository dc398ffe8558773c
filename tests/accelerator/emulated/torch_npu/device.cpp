// A device "npu" on the CPU: two of it, with memory, streams, events, page-locked host memory and collectives of their own.
//
//   operators ──▶ fallback: refuses mixed devices ──▶ torch's kernels for the CPU
//   copies that do not block, from and to page-locked memory ──▶ the line of their stream ──▶ done when somebody waits
//
// A copy that nobody has waited for has not happened: until then its target holds JUNK. Who waits is known by vector
// clocks: of each stream, the number of the last copy of every other stream that it waits for.
#include <torch/extension.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex COUNT = 2;
constexpr int JUNK = 0x7f;  // as float32: 3.4e38
thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId streams[COUNT] = {0, 0};
std::atomic<c10::StreamId> next_stream{1};
std::atomic<int64_t> allocated[COUNT];

void check_index(int index) {
  TORCH_CHECK(index < COUNT, "npu:", index, " is not here: there are ", static_cast<int>(COUNT));
}

at::Tensor as_cpu(const at::Tensor& tensor) {  // the same memory
  auto storage = tensor.storage();
  auto drop = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  c10::DataPtr data(storage.mutable_data(), new c10::Storage(storage), drop, at::kCPU);
  c10::Storage whole(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false);
  auto result = at::empty({0}, at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  result.set_(whole, tensor.storage_offset(), tensor.sizes(), tensor.strides());
  return tensor.is_conj() ? result.conj() : result;
}

// --- copies that wait --------------------------------------------------------------------------------------------------

using Key = std::pair<int, c10::StreamId>;
using Clock = std::map<Key, uint64_t>;  // of each stream: the number of its last copy that is waited for
struct Copy {
  uint64_t number;
  at::Tensor to, from;
  Clock after;
  bool to_host;
};
struct Line {
  std::deque<Copy> copies;
  uint64_t last = 0;
  Clock waits;
};
std::recursive_mutex lines_lock;
std::map<Key, Line>& lines = *new std::map<Key, Line>;  // never destroyed: it has tensors

void finish(const Clock& clock, bool to_host) {
  // Does the copies that `clock` covers. Those to host memory may stay where only a stream has waited.
  std::lock_guard<std::recursive_mutex> guard(lines_lock);
  for (const auto& [key, number] : clock) {
    auto& copies = lines[key].copies;
    auto is_due = [&, last = number](const Copy& copy) { return copy.number <= last && (to_host || !copy.to_host); };
    while (true) {
      auto next = std::find_if(copies.begin(), copies.end(), is_due);
      if (next == copies.end()) break;
      Copy copy = *next;
      copies.erase(next);
      if (!copy.to_host) finish(copy.after, true);  // it reads host memory that an earlier copy may write
      copy.to.copy_(copy.from);
    }
  }
}

Clock clock_of(const Key& key) {
  std::lock_guard<std::recursive_mutex> guard(lines_lock);
  Clock clock = lines[key].waits;
  clock[key] = lines[key].last;
  return clock;
}

Key key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

Clock here(c10::DeviceIndex index) { return clock_of({index, streams[index]}); }

void add(c10::DeviceIndex index, const at::Tensor& to, const at::Tensor& from, bool to_host) {
  std::lock_guard<std::recursive_mutex> guard(lines_lock);
  Key key{index, streams[index]};
  Clock after = clock_of(key);
  auto& line = lines[key];
  std::memset(to.data_ptr(), JUNK, to.nbytes());
  line.copies.push_back({++line.last, to, from, after, to_host});
}

struct Moment {
  double milliseconds;
  Clock clock;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = KIND;
  c10::DeviceType type() const override { return KIND; }
  c10::Device getDevice() const override { return {KIND, current}; }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  void setDevice(c10::Device device) const override {
    check_index(device.index());
    uncheckedSetDevice(device);
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }

  static c10::DeviceIndex index_of(c10::Device device) { return device.index() < 0 ? current : device.index(); }
  static c10::Stream at(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, index_of(device)), id);
  }
  c10::Stream getStream(c10::Device device) const override { return at(device, streams[index_of(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return at(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return at(device, next_stream++); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return at(device, next_stream++); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { finish(clock_of(key_of(stream)), true); }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    std::lock_guard<std::recursive_mutex> guard(lines_lock);
    Clock all;
    for (const auto& [key, line] : lines)
      if (key.first == index) all[key] = line.last;
    finish(all, true);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex index, const c10::EventFlag) const override {
    TORCH_CHECK(index == -1 || index == stream.device_index(), "an event of another device");
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    if (!*event) *event = new Moment;
    auto milliseconds = std::chrono::duration<double, std::milli>(now).count();
    *static_cast<Moment*>(*event) = {milliseconds, clock_of(key_of(stream))};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    std::lock_guard<std::recursive_mutex> guard(lines_lock);
    auto& waits = lines[key_of(stream)].waits;
    for (const auto& [key, number] : static_cast<Moment*>(event)->clock) waits[key] = std::max(waits[key], number);
  }
  void synchronizeEvent(void* event) const override {
    if (event) finish(static_cast<Moment*>(event)->clock, true);
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return static_cast<Moment*>(end)->milliseconds - static_cast<Moment*>(start)->milliseconds;
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// --- memory ------------------------------------------------------------------------------------------------------------

struct Block {
  void* memory;
  size_t bytes;
  c10::DeviceIndex index;
};

void drop_block(void* kept) {
  auto block = static_cast<Block*>(kept);
  allocated[block->index] -= block->bytes;
  std::free(block->memory);
  delete block;
}

c10::DataPtr allocate_block(size_t bytes) {
  auto block = new Block{bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr, bytes, current};
  allocated[current] += bytes;
  return {block->memory, block, &drop_block, c10::Device(KIND, current)};
}

struct PlainAllocator final : c10::Allocator {  // as torch_npu has it up to 2.12
  c10::DataPtr allocate(size_t bytes) override { return allocate_block(bytes); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

struct CountingAllocator final : c10::DeviceAllocator {  // from 2.13 on
  c10::DataPtr allocate(size_t bytes) override { return allocate_block(bytes); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = allocated[index < 0 ? current : index];
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {1u << 30, 1u << 30}; }
};

c10::Allocator* allocator() {
  static PlainAllocator plain;
  static CountingAllocator counting;
  const char* version = std::getenv("EMULATED_NPU");
  return version && std::string(version) < "2.13" ? static_cast<c10::Allocator*>(&plain) : &counting;
}

std::mutex pinned_lock;
std::map<const char*, size_t>& pinned = *new std::map<const char*, size_t>;  // blocks by their ends

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto block = pinned.upper_bound(static_cast<const char*>(data));
  return block != pinned.end() && block->first - block->second <= static_cast<const char*>(data);
}

struct PinnedBlock {
  void* memory;
  size_t bytes;
};

void drop_pinned(void* kept) {
  auto block = static_cast<PinnedBlock*>(kept);
  {
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.erase(static_cast<char*>(block->memory) + block->bytes);
  }
  std::free(block->memory);
  delete block;
}

struct HostAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    size_t whole = (bytes + 64) / 64 * 64;
    auto block = new PinnedBlock{std::aligned_alloc(64, whole), whole};
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[static_cast<char*>(block->memory) + whole] = whole;
    return {block->memory, block, &drop_pinned, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} host_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    check_index(index);
    current = index;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current : std::exchange(current, index);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator; }
  c10::Device getDeviceFromPtr(void*) const override { return {KIND, current}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::OptionalDeviceGuard guard(storage.device());
    auto fresh = allocator()->allocate(bytes);
    if (bytes && storage.nbytes()) std::memcpy(fresh.mutable_get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
} hooks;

// --- operators -----------------------------------------------------------------------------------------------------------

thread_local bool inside = false;  // an operator: the copies that it makes are its own

caffe2::TypeMeta refuse_float64(std::optional<at::ScalarType> dtype) {
  // Stricter than the real device, where some operators take it, some fail, and a cast to it gives float32 with a warning.
  auto found = c10::dtype_or_default(dtype);
  TORCH_CHECK(found != at::kDouble && found != at::kComplexDouble, "npu does not support float64");
  return c10::scalarTypeToTypeMeta(found);
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only dense CPU tensors can be pinned");
  auto meta = refuse_float64(dtype);
  c10::OptionalDeviceGuard guard(device);
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, allocator(), keys, meta.toScalarType(), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  auto meta = refuse_float64(dtype);
  c10::OptionalDeviceGuard guard(device);
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, allocator(), keys, meta.toScalarType());
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto index = (from.is_cpu() ? to : from).device().index();
  auto source = from.is_cpu() ? from : as_cpu(from);
  auto target = to.is_cpu() ? to : as_cpu(to);
  if (inside) {
    target.copy_(source);
    return to;
  }
  bool between = from.is_cpu() != to.is_cpu();
  const auto& host = from.is_cpu() ? source : target;
  bool plain = to.is_contiguous() && to.numel() && (to.is_cpu() || (from.is_contiguous() && from.dtype() == to.dtype()));
  if (between && non_blocking && plain && is_pinned(host.data_ptr())) {
    finish(here(index), false);
    add(index, target, to.is_cpu() ? source.clone() : source, to.is_cpu());
    return to;
  }
  finish(here(index), between && !non_blocking);
  if (!from.is_cpu() && !to.is_cpu()) finish(here(to.device().index()), false);
  target.copy_(source);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& tensor) {
  finish(here(tensor.device().index()), true);
  return as_cpu(tensor).item();
}

const at::Tensor& resize(const at::Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  finish(here(tensor.device().index()), false);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  auto offset = tensor.storage_offset();
  auto needed = at::detail::computeStorageNbytesContiguous(size, tensor.dtype().itemsize(), offset);
  if (needed > tensor.storage().nbytes()) hooks.resizePrivateUse1Bytes(tensor.storage(), needed);
  return tensor;
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  std::optional<at::Device> device;
  bool on_cpu = false;
  auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.device().type() != KIND) {
      on_cpu = on_cpu || tensor.dim() > 0;
      return;
    }
    TORCH_CHECK(
        !device || *device == tensor.device(), name, ": Expected all tensors to be on the same device, found ",
        device.value_or(tensor.device()), " and ", tensor.device());
    device = tensor.device();
  };
  for (const auto& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (argument.isTensor()) look(argument.toTensor());
    if (argument.isTensorList())
      for (const at::Tensor& tensor : argument.toTensorVector()) look(tensor);
    if (argument.isOptionalTensorList())  // indices, which may be on the CPU
      for (const std::optional<at::Tensor>& tensor : argument.toOptionalTensorList())
        if (tensor && tensor->defined() && !tensor->is_cpu()) look(*tensor);
  }
  TORCH_CHECK(!device || !on_cpu, name, ": Expected all tensors to be on the same device, found ", *device, " and cpu");
  c10::OptionalDeviceGuard guard(device);
  if (device) finish(here(device->index()), false);
  struct Inside {
    bool before = std::exchange(inside, true);
    ~Inside() { inside = before; }
  } within;
  at::native::cpu_fallback(op, stack);
}

bool is_compatible(const at::Tensor&, const at::Tensor&) { return true; }

int64_t plain_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;
}

// --- collectives ----------------------------------------------------------------------------------------------------------

using Work = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

Tensors on_host(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) {
    if (!tensor.is_cpu()) finish(here(tensor.device().index()), true);
    TORCH_CHECK(!tensor.is_cpu(), "hccl: no tensor of an npu");
    result.push_back(as_cpu(tensor));
  }
  return result;
}

std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> result;
  for (const auto& tensors : lists) result.push_back(on_host(tensors));
  return result;
}

struct Hccl final : c10d::Backend {  // gloo on the devices' memory
  c10::intrusive_ptr<c10d::Backend> gloo;
  explicit Hccl(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), gloo(std::move(inner)) {}
  const std::string getBackendName() const override { return "hccl"; }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto given = on_host(tensors);
    return gloo->broadcast(given, options);
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto given = on_host(tensors);
    return gloo->allreduce(given, options);
  }
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto given = on_host(tensors);
    return gloo->allreduce_coalesced(given, options);
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto given = on_host(tensors);
    return gloo->reduce(given, options);
  }
  Work allgather(std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& options) override {
    auto result = on_host(to);
    auto given = on_host(from);
    return gloo->allgather(result, given, options);
  }
  Work _allgather_base(at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& options) override {
    auto given = on_host({to, from});
    return gloo->_allgather_base(given[0], given[1], options);
  }
  Work allgather_into_tensor_coalesced(Tensors& to, Tensors& from, const c10d::AllgatherOptions& options) override {
    auto result = on_host(to), given = on_host(from);
    return gloo->allgather_into_tensor_coalesced(result, given, options);
  }
  Work reduce_scatter(Tensors& to, std::vector<Tensors>& from, const c10d::ReduceScatterOptions& options) override {
    auto result = on_host(to);
    auto given = on_host(from);
    return gloo->reduce_scatter(result, given, options);
  }
  Work _reduce_scatter_base(at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& options) override {
    auto given = on_host({to, from});
    return gloo->_reduce_scatter_base(given[0], given[1], options);
  }
  Work reduce_scatter_tensor_coalesced(Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& options) override {
    auto result = on_host(to), given = on_host(from);
    return gloo->reduce_scatter_tensor_coalesced(result, given, options);
  }
  Work alltoall_base(
      at::Tensor& to, at::Tensor& from, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
      const c10d::AllToAllOptions& options) override {
    auto given = on_host({to, from});
    return gloo->alltoall_base(given[0], given[1], to_sizes, from_sizes, options);
  }
  Work gather(std::vector<Tensors>& to, Tensors& from, const c10d::GatherOptions& options) override {
    auto result = on_host(to);
    auto given = on_host(from);
    return gloo->gather(result, given, options);
  }
  Work scatter(Tensors& to, std::vector<Tensors>& from, const c10d::ScatterOptions& options) override {
    auto result = on_host(to);
    auto given = on_host(from);
    return gloo->scatter(result, given, options);
  }
  Work send(Tensors& tensors, int to, int tag) override {
    auto given = on_host(tensors);
    return gloo->send(given, to, tag);
  }
  Work recv(Tensors& tensors, int from, int tag) override {
    auto given = on_host(tensors);
    return gloo->recv(given, from, tag);
  }
  Work barrier(const c10d::BarrierOptions& options) override { return gloo->barrier(options); }
};

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &plain_attention)
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("resize_", &resize);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("alias", TORCH_FN(at::native::alias));
  m.impl("set_", static_cast<at::Tensor& (*)(at::Tensor&)>(at::native::set_cpu_));
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", static_cast<at::Tensor& (*)(at::Tensor&, const at::Tensor&)>(at::native::set_tensor_));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CatchAll, m) { m.impl("_has_compatible_shallow_copy_type", TORCH_FN(is_compatible)); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(KIND, allocator());
  at::RegisterPrivateUse1HooksInterface(&hooks);
  at::setHostAllocator(at::kPrivateUse1, &host_allocator, 0);
  m.def("allocated", [](int index) { return allocated[index].load(); });
  m.def("current", [] { return static_cast<int>(current); });
  m.def("set_current", [](int index) {
    check_index(index);
    if (index >= 0) current = index;
  });
  m.def("hccl", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Hccl>(std::move(gloo));
  });
}
