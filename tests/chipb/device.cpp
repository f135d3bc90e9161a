// A device type of its own without hardware, for tests: memory of the host that only this device
// may touch, computed on by way of copies to the CPU's own kernels.
//
// It is as strict as a real one where mistakes would hide: new memory holds NaN, an operation
// refuses tensors of the host beside its own, and a copy to pinned memory on a side stream
// happens as late as it may: when somebody waits for it. What was freed until then without
// record_stream arrives as NaN. All other work is done at once, and checked for the order of streams
// that makes it right.

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>

#include "order.h"

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex NUM_DEVICES = 8;
constexpr int NOT_A_NUMBER = 0xFF; // every byte of it, in any floating dtype

/// Guards all memory and streams. Nothing that PyTorch counts references of is touched under it:
/// that may need Python's lock, which a thread that waits here may hold.
std::mutex machine;
Order& order() {
  static auto* order = new Order();
  return *order;
}
thread_local bool is_inside = false; // an operation, whose own copies are its own affair

thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[NUM_DEVICES] = {};

// --- memory ---

struct Block {
  int64_t size = 0;
  int64_t number = 0; // no two blocks have the same, one after the other at one address either
  c10::StreamId stream = 0; // that it was allocated on
  Uses uses;
  std::set<c10::StreamId> lent; // record_stream
  std::set<c10::StreamId> ever_lent;
  bool is_dropped = false; // free it when those streams are done
};

class Memory final : public c10::Allocator {
 public:
  explicit Memory(c10::DeviceType type) : type_(type) {}

  c10::DataPtr allocate(size_t size) override;

  c10::DeleterFnPtr raw_deleter() const override;

  void copy_data(void* target, const void* source, size_t size) const override {
    default_copy_data(target, source, size);
  }

  /// The block that this address lies in, or null.
  Block* find(const void* data) {
    auto after = blocks_.upper_bound(static_cast<const char*>(data));
    if (after == blocks_.begin()) {
      return nullptr;
    }
    auto& [start, block] = *std::prev(after);
    return static_cast<const char*>(data) < start + block.size ? &block : nullptr;
  }

  void drop(void* data) {
    auto found = blocks_.find(static_cast<const char*>(data));
    found->second.is_dropped = true;
    if (found->second.lent.empty()) {
      release(found);
    }
  }

  /// A stream has done all it had to do.
  void give_back(c10::StreamId stream) {
    for (auto next = blocks_.begin(); next != blocks_.end();) {
      auto each = next++;
      if (each->second.lent.erase(stream) && each->second.is_dropped &&
          each->second.lent.empty()) {
        release(each);
      }
    }
  }

  void forget() {
    for (auto& [start, block] : blocks_) {
      block.uses.clear();
    }
  }

  int64_t peak = 0;

 private:
  void release(std::map<const char*, Block>::iterator found) {
    auto* data = const_cast<char*>(found->first);
    order().free(found->second.stream, found->second.uses, found->second.ever_lent);
    used_ -= found->second.size;
    std::memset(data, NOT_A_NUMBER, found->second.size);
    blocks_.erase(found);
    c10::free_cpu(data);
  }

  c10::DeviceType type_;
  std::map<const char*, Block> blocks_;
  int64_t used_ = 0;
  int64_t num_blocks_ = 0;
};

Memory& device_memory() {
  static auto* memory = new Memory(TYPE); // outlives every tensor
  return *memory;
}
Memory& pinned_memory() {
  static auto* memory = new Memory(c10::DeviceType::CPU);
  return *memory;
}
void free_device(void* data) {
  std::lock_guard<std::mutex> held(machine);
  device_memory().drop(data);
}
void free_pinned(void* data) {
  std::lock_guard<std::mutex> held(machine);
  pinned_memory().drop(data);
}
bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> held(machine);
  return pinned_memory().find(data) != nullptr;
}

c10::DeleterFnPtr Memory::raw_deleter() const {
  return type_ == TYPE ? free_device : free_pinned;
}

c10::DataPtr Memory::allocate(size_t size) {
  const auto device = type_ == TYPE ? c10::Device(TYPE, current_device) : c10::Device(type_);
  if (size == 0) {
    return {nullptr, device};
  }
  void* data = c10::alloc_cpu(size);
  std::memset(data, NOT_A_NUMBER, size);
  std::lock_guard<std::mutex> held(machine);
  auto& block = blocks_[static_cast<char*>(data)];
  block.size = static_cast<int64_t>(size);
  block.number = ++num_blocks_;
  if (type_ == TYPE) {
    const auto* low = static_cast<const char*>(data);
    block.stream = current_stream[current_device];
    block.uses = order().allocate(block.stream, low, low + size);
  }
  used_ += block.size;
  peak = std::max(peak, used_);
  return {data, data, raw_deleter(), device};
}

// --- streams: all but the default one put copies to the host off ---

/// A part of a block, which may be gone when it is needed.
struct Place {
  Memory* memory;
  void* data;
  int64_t number;

  static Place of(Memory& memory, void* data) {
    auto* block = memory.find(data);
    TORCH_CHECK(block != nullptr, "no memory of the device's");
    return {&memory, data, block->number};
  }
  bool is_there() const {
    auto* block = memory->find(data);
    return block != nullptr && block->number == number;
  }
};

struct Copy {
  int64_t number;
  Place source;
  Place target;
  size_t size;

  void run() const {
    if (!target.is_there()) {
      return;
    }
    if (source.is_there()) {
      std::memcpy(target.data, source.data, size);
    } else {
      std::memset(target.data, NOT_A_NUMBER, size);
    }
  }
};

std::map<c10::StreamId, std::deque<Copy>> queues;
std::atomic<c10::StreamId> last_stream{0};
std::atomic<int64_t> last_copy{0};

void put_off(c10::StreamId stream, void* source, void* target, size_t size) {
  std::lock_guard<std::mutex> held(machine);
  const auto from = Place::of(device_memory(), source);
  const auto to = Place::of(pinned_memory(), target);
  queues[stream].push_back({++last_copy, from, to, size});
}

/// Do what a stream has put off, up to a copy's number.
void finish(c10::StreamId stream, int64_t upto) {
  std::lock_guard<std::mutex> held(machine);
  auto& queue = queues[stream];
  while (!queue.empty() && queue.front().number <= upto) {
    queue.front().run();
    queue.pop_front();
  }
  if (queue.empty()) {
    device_memory().give_back(stream);
  }
}

/// The host knows what a stream has done until now.
void host_waits_for(c10::StreamId stream) {
  std::lock_guard<std::mutex> held(machine);
  order().wait_on_host(order().at(stream));
}

struct Event {
  c10::StreamId stream;
  int64_t number;
  Clock clock;
  std::chrono::steady_clock::time_point at;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return TYPE;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {TYPE, current_device};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < NUM_DEVICES, "no such device: ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) {
      current_device = device.index();
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return NUM_DEVICES;
  }

  c10::Stream stream(c10::Device device, c10::StreamId id) const {
    const auto index = device.has_index() ? device.index() : current_device;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, index), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_stream[device.has_index() ? device.index() : current_device]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(device, ++last_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream(device, ++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const auto before = getStream(to.device());
    current_stream[to.device_index()] = to.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    finish(stream.id(), last_copy);
    host_waits_for(stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    for (c10::StreamId stream = 0; stream <= last_stream; ++stream) {
      finish(stream, last_copy);
      host_waits_for(stream);
    }
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    std::lock_guard<std::mutex> held(machine);
    *static_cast<Event*>(*event) = {stream.id(), last_copy, order().at(stream.id()),
                                         std::chrono::steady_clock::now()};
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      const auto& mark = *static_cast<Event*>(event);
      finish(mark.stream, mark.number);
      std::lock_guard<std::mutex> held(machine);
      order().wait_on_host(mark.clock);
    }
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      const auto& mark = *static_cast<Event*>(event);
      finish(mark.stream, mark.number);
      std::lock_guard<std::mutex> held(machine);
      order().wait(stream.id(), mark.clock);
    }
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto passed = static_cast<Event*>(second)->at - static_cast<Event*>(first)->at;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return NUM_DEVICES;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Guard().setDevice({TYPE, device});
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({TYPE, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), size);
  }
};

// --- the few operations that are the device's own ---

bool is_own(const at::Tensor& tensor) {
  return tensor.device().type() == TYPE;
}

/// The same memory as the CPU sees it.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_own(tensor) || tensor.numel() == 0) {
    return is_own(tensor) ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU)) : tensor;
  }
  const auto options = tensor.options().device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

/// Check what an operation uses on its stream, and remember it.
void use(c10::StreamId stream, const std::string& what, const std::vector<at::Tensor>& reads,
         const std::vector<at::Tensor>& writes) {
  if (is_inside) {
    return;
  }
  std::lock_guard<std::mutex> held(machine);
  const auto number = order().begin(stream);
  const auto* name = order().name(what);
  std::vector<std::pair<Uses*, Use>> found;
  const auto look = [&](const at::Tensor& tensor, bool is_written) {
    if (!tensor.defined() || !is_own(tensor) || tensor.numel() == 0) {
      return;
    }
    const auto* low = static_cast<const char*>(tensor.data_ptr());
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      last += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
    const auto* high = low + (last + 1) * tensor.element_size();
    if (auto* block = device_memory().find(low)) {
      const Use now = {stream, number, name, is_written, low, high};
      order().check(block->uses, now);
      found.emplace_back(&block->uses, now);
    }
  };
  for (const auto& tensor : reads) {
    look(tensor, false);
  }
  for (const auto& tensor : writes) {
    look(tensor, true);
  }
  for (const auto& [uses, now] : found) {
    order().keep(*uses, now);
  }
}

c10::DispatchKeySet own_keys() {
  return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &device_memory(), own_keys(), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &device_memory(), own_keys(), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto stream = is_own(from) ? current_stream[from.get_device()] : 0;
  const bool is_plain = from.is_contiguous() && to.is_contiguous() && from.dtype() == to.dtype() &&
      from.sizes() == to.sizes() && from.numel() > 0;
  const auto here = current_stream[(is_own(from) ? from : to).get_device()];
  use(here, is_own(from) ? is_own(to) ? "copy" : "copy to the host" : "copy from the host", {from},
      {to});
  if (non_blocking && stream != 0 && is_plain && !is_own(to) && is_pinned(to.data_ptr())) {
    put_off(stream, from.data_ptr(), to.data_ptr(), from.nbytes());
    return to;
  }
  on_host(to).copy_(on_host(from));
  if (!is_inside && (!is_own(from) || !is_own(to)) && !(non_blocking && is_own(to))) {
    host_waits_for(here);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar to_scalar(const at::Tensor& tensor) {
  const auto stream = current_stream[tensor.get_device()];
  use(stream, "reading a number", {tensor}, {});
  host_waits_for(stream);
  return on_host(tensor).item();
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
  auto* data = tensor.data_ptr();
  std::lock_guard<std::mutex> held(machine);
  if (auto* block = device_memory().find(data)) {
    block->lent.insert(stream.id());
    block->ever_lent.insert(stream.id());
  }
}

/// All else: copies to the CPU, its kernel, and back. As on a real device, only a number (a tensor
/// without dimensions) and indices may come from the host.
void by_way_of_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const bool takes_indices = schema.name().find("index") != std::string::npos;
  const auto check = [&](const at::Tensor& tensor) {
    const bool is_fine =
        !tensor.defined() || is_own(tensor) || tensor.dim() == 0 || takes_indices;
    TORCH_CHECK(is_fine, schema.name(), ": a tensor on ", tensor.device(), " beside one on ",
                c10::Device(TYPE));
  };
  std::vector<at::Tensor> reads, writes;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& given = torch::jit::peek(*stack, i, schema.arguments().size());
    const auto* alias = schema.arguments()[i].alias_info();
    auto& used = alias != nullptr && alias->isWrite() ? writes : reads;
    if (given.isTensor()) {
      check(given.toTensor());
      used.push_back(given.toTensor());
    } else if (given.isTensorList()) {
      for (const at::Tensor& tensor : given.toTensorVector()) {
        check(tensor);
        used.push_back(tensor);
      }
    } else if (given.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : given.toOptionalTensorVector()) {
        used.push_back(tensor.value_or(at::Tensor()));
      }
    }
  }
  const auto stream = current_stream[current_device];
  use(stream, schema.name(), reads, writes);
  const bool was_inside = std::exchange(is_inside, true);
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    is_inside = was_inside;
    throw;
  }
  is_inside = was_inside;
  std::vector<at::Tensor> made;
  for (const auto& given : torch::jit::last(*stack, schema.returns().size())) {
    if (given.isTensor()) {
      made.push_back(given.toTensor());
    } else if (given.isTensorList()) {
      for (const at::Tensor& tensor : given.toTensorVector()) {
        made.push_back(tensor);
      }
    }
  }
  use(stream, schema.name(), {}, made);
}

/// For a library of collectives: one operation on the stream that is current.
void call(at::TensorList reads, at::TensorList writes, std::string what) {
  use(current_stream[current_device], what, reads.vec(), writes.vec());
}

/// The bytes of a contiguous tensor now, or new ones, whatever the order of streams.
at::Tensor load(const at::Tensor& tensor) {
  auto bytes = at::empty({static_cast<int64_t>(tensor.nbytes())}, at::kByte);
  std::memcpy(bytes.data_ptr(), tensor.data_ptr(), tensor.nbytes());
  return bytes;
}
void store(const at::Tensor& tensor, const at::Tensor& bytes) {
  std::lock_guard<std::mutex> held(machine);
  TORCH_CHECK(tensor.nbytes() == bytes.nbytes() && device_memory().find(tensor.data_ptr()),
              "memory was freed before anybody waited for what comes to it");
  std::memcpy(tensor.data_ptr(), bytes.data_ptr(), bytes.nbytes());
}

void forget() {
  std::lock_guard<std::mutex> held(machine);
  order().forget();
  device_memory().forget();
}

int64_t peak_bytes() {
  std::lock_guard<std::mutex> held(machine);
  return device_memory().peak;
}

/// The most that a process holds at once of a processor's memory, from when it begins to count.
class Counted final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    void* data = c10::alloc_cpu(size);
    std::lock_guard<std::mutex> held(counting);
    sizes[data] = static_cast<int64_t>(size);
    used += static_cast<int64_t>(size);
    peak = std::max(peak, used);
    return {data, data, &free_counted, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_counted;
  }

  void copy_data(void* target, const void* source, size_t size) const override {
    default_copy_data(target, source, size);
  }

  std::mutex counting;
  std::map<void*, int64_t> sizes;
  int64_t used = 0;
  int64_t peak = 0;

 private:
  static void free_counted(void* data);
};

Counted& counted() {
  static auto* memory = new Counted(); // outlives every tensor
  return *memory;
}
void Counted::free_counted(void* data) {
  auto& memory = counted();
  std::lock_guard<std::mutex> held(memory.counting);
  if (auto found = memory.sizes.find(data); found != memory.sizes.end()) {
    memory.used -= found->second;
    memory.sizes.erase(found);
  }
  c10::free_cpu(data);
}

/// Begin to count what comes from here on; what was there before is no part of it.
void count() {
  c10::SetCPUAllocator(&counted(), 1);
  std::lock_guard<std::mutex> held(counted().counting);
  counted().used = counted().peak = 0;
  counted().sizes.clear();
}

int64_t most_bytes() {
  std::lock_guard<std::mutex> held(counted().counting);
  return counted().peak;
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

} // namespace

TORCH_LIBRARY(chipb, m) {
  static auto* hooks = new Hooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
  m.def("peak_bytes() -> int", &peak_bytes);
  m.def("forget() -> ()", &forget);
  m.def("count() -> ()", &count);
  m.def("most_bytes() -> int", &most_bytes);
  m.def("call(Tensor[] reads, Tensor[] writes, str what) -> ()", &call);
  m.def("load(Tensor tensor) -> Tensor", &load);
  m.def("store(Tensor tensor, Tensor bytes) -> ()", &store);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_way_of_the_host>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &to_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_", &at::native::set_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
}
