// The launcher's CUDA backend: reads a GPU plan (emmy/codegen/gpu_plan.py says its form), loads its cubin, launches its
// kernels on the caller's stream. Knows no op and no schedule. The driver is opened when the first plan is, and its few
// calls are declared here, so that this compiles on machines without CUDA.
#include "backend.h"

#include <dlfcn.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace {

// ---------------------------------------------------------------- the driver, as far as it is needed (cuda.h, CUDA 11.8 and later)
using CuResult = int;
using CuContext = struct CuContextOpaque *;
using CuModule = struct CuModuleOpaque *;
using CuFunction = struct CuFunctionOpaque *;
using CuStream = struct CuStreamOpaque *;
using CuEvent = struct CuEventOpaque *;
using CuPointer = unsigned long long;

struct alignas(64) TensorMap {
  uint64_t words[16];
};

struct LaunchAttribute {
  int id;
  int pad = 0;
  union {
    unsigned cluster[3];
    int on;
    char room[64];
  };
};

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, smem_bytes;
  CuStream stream;
  const LaunchAttribute *attributes;
  unsigned n_attributes;
};

constexpr int kMaxDynamicSmem = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kSmemWithoutAsking = 48 * 1024;
constexpr int kPromoteL2To256 = 3;  // CU_TENSOR_MAP_L2_PROMOTION_L2_256B
constexpr int kClusterDimension = 4;  // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
constexpr int kRank = 5;  // of a tensor map, at most
constexpr unsigned kWithoutTime = 2;  // CU_EVENT_DISABLE_TIMING
constexpr int kEarly = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

struct Driver {
  CuResult (*cuInit)(unsigned);
  CuResult (*cuGetErrorString)(CuResult, const char **);
  CuResult (*cuCtxGetCurrent)(CuContext *);
  CuResult (*cuCtxSetCurrent)(CuContext);
  CuResult (*cuDevicePrimaryCtxRetain)(CuContext *, int);
  CuResult (*cuDevicePrimaryCtxRelease_v2)(int);
  CuResult (*cuModuleLoadData)(CuModule *, const void *);
  CuResult (*cuModuleUnload)(CuModule);
  CuResult (*cuModuleGetFunction)(CuFunction *, CuModule, const char *);
  CuResult (*cuFuncSetAttribute)(CuFunction, int, int);
  CuResult (*cuMemAlloc_v2)(CuPointer *, std::size_t);
  CuResult (*cuMemFree_v2)(CuPointer);
  CuResult (*cuMemsetD8_v2)(CuPointer, unsigned char, std::size_t);
  CuResult (*cuStreamSynchronize)(CuStream);
  CuResult (*cuStreamIsCapturing)(CuStream, int *);
  CuResult (*cuStreamWaitEvent)(CuStream, CuEvent, unsigned);
  CuResult (*cuEventCreate)(CuEvent *, unsigned);
  CuResult (*cuEventRecord)(CuEvent, CuStream);
  CuResult (*cuEventDestroy_v2)(CuEvent);
  CuResult (*cuTensorMapEncodeTiled)(TensorMap *, int, uint32_t, void *, const uint64_t *, const uint64_t *,
                                     const uint32_t *, const uint32_t *, int, int, int, int);
  CuResult (*cuLaunchKernelEx)(const LaunchConfig *, CuFunction, void **, void **);
};

template <class F>
bool find(void *library, const char *name, F &into) {
  into = reinterpret_cast<F>(dlsym(library, name));
  return into != nullptr;
}

// The driver, opened once; null when it is not there, and `why` says what is missing.
const Driver *driver(std::string &why) {
  static Driver d;
  static const std::string missing = []() -> std::string {
    void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!lib) return "no NVIDIA driver: libcuda.so.1 is not found";
#define EMMY_GET(name) \
  if (!find(lib, #name, d.name)) return "this NVIDIA driver is too old: it lacks " #name;
    EMMY_GET(cuInit) EMMY_GET(cuGetErrorString) EMMY_GET(cuCtxGetCurrent) EMMY_GET(cuCtxSetCurrent)
    EMMY_GET(cuDevicePrimaryCtxRetain) EMMY_GET(cuDevicePrimaryCtxRelease_v2) EMMY_GET(cuModuleLoadData)
    EMMY_GET(cuModuleUnload) EMMY_GET(cuModuleGetFunction) EMMY_GET(cuFuncSetAttribute) EMMY_GET(cuMemAlloc_v2)
    EMMY_GET(cuMemFree_v2) EMMY_GET(cuMemsetD8_v2) EMMY_GET(cuStreamSynchronize) EMMY_GET(cuTensorMapEncodeTiled) EMMY_GET(cuLaunchKernelEx)
    EMMY_GET(cuStreamIsCapturing) EMMY_GET(cuStreamWaitEvent) EMMY_GET(cuEventCreate) EMMY_GET(cuEventRecord) EMMY_GET(cuEventDestroy_v2)
#undef EMMY_GET
    if (CuResult r = d.cuInit(0)) return "the NVIDIA driver does not start: error " + std::to_string(r);
    return "";
  }();
  why = missing;
  return missing.empty() ? &d : nullptr;
}

// ---------------------------------------------------------------- whole numbers in postfix
struct Word {
  char kind;  // '#' constant, '$' symbol, else the operation: + - * / % m (min) M (max)
  int64_t value;
};

struct Whole {
  std::vector<Word> words;

  int64_t of(const int64_t *syms) const {
    int64_t stack[kDepth];
    int top = -1;
    for (const Word &w : words) {
      if (w.kind == '#') stack[++top] = w.value;
      else if (w.kind == '$') stack[++top] = syms[w.value];
      else {
        const int64_t b = stack[top--], a = stack[top];
        switch (w.kind) {
          case '+': stack[top] = a + b; break;
          case '-': stack[top] = a - b; break;
          case '*': stack[top] = a * b; break;
          case '/': stack[top] = b > 0 ? a / b : 0; break;  // kernels divide by sizes alone
          case '%': stack[top] = b > 0 ? a % b : 0; break;
          case 'm': stack[top] = a < b ? a : b; break;
          case 'M': stack[top] = a < b ? b : a; break;
        }
      }
    }
    return stack[0];
  }

  // Reads words up to `end` or the line's end; false when they are no expression.
  bool read(std::istringstream &line, std::size_t n_syms) {
    int depth = 0;
    for (std::string w; line >> w && w != ":";) {
      const bool is_number = w.find_first_not_of("0123456789", w[0] == '$' || w[0] == '-' ? 1 : 0) == std::string::npos &&
                             w != "-" && w != "$";
      if (is_number && w[0] == '$') {
        const unsigned long at = std::stoul(w.substr(1));
        if (at >= n_syms) return false;
        words.push_back({'$', static_cast<int64_t>(at)}), ++depth;
      } else if (is_number) {
        words.push_back({'#', std::stoll(w)}), ++depth;
      } else {
        const char op = w == "min" ? 'm' : w == "max" ? 'M' : w.size() == 1 && std::strchr("+-*/%", w[0]) ? w[0] : 0;
        if (!op || --depth < 1) return false;
        words.push_back({op, 0});
      }
      if (depth > kDepth) return false;
    }
    return depth == 1;
  }

 private:
  static constexpr int kDepth = 16;
};

// ---------------------------------------------------------------- the plan
struct Sym {
  std::string name;
  int64_t lo, hi;
};

struct Buffer {
  std::string name;
  int64_t item_bytes;
  Whole elements;
  CuPointer own = 0;  // a workspace's memory
};

struct Parameter {
  enum Kind { kMap, kBuffer, kSize } kind;
  int32_t of;  // buffer or symbol
  // of a tensor map
  int data_type = 0, swizzle = 0;
  uint32_t box[3] = {0, 0, 0};  // columns, rows, panels (0: no such dimension)
  int64_t item_bytes = 0;
  Whole columns, rows;
  std::vector<Whole> further;  // elements from row to row, then positions and elements apart of each further dimension
  // what the kernel is given
  TensorMap map{};
  CuPointer address = 0;
  int32_t size = 0;
};

struct Kernel {
  std::string name;
  unsigned threads, smem_bytes;
  Whole blocks;
  std::vector<LaunchAttribute> attributes;
  std::vector<Parameter> parameters;
  std::vector<void *> given;  // addresses of what the parameters hold
  CuFunction function = nullptr;
};

int data_type(const std::string &dtype) {  // CUtensorMapDataType
  return dtype == "f16" ? 6 : dtype == "f32" ? 7 : dtype == "bf16" ? 9 : -1;
}

// Makes the plan's context current for as long as it lives.
class Within {
 public:
  Within(const Driver &d, CuContext wanted) : driver_(d), wanted_(wanted) {
    driver_.cuCtxGetCurrent(&before_);
    if (before_ != wanted_) driver_.cuCtxSetCurrent(wanted_);
  }
  ~Within() {
    if (before_ != wanted_) driver_.cuCtxSetCurrent(before_);
  }

 private:
  const Driver &driver_;
  CuContext wanted_, before_ = nullptr;
};

class Cuda final : public Backend {
 public:
  ~Cuda() override {
    if (!context_) return;
    {
      Within here(*driver_, context_);
      if (event_) driver_->cuEventDestroy_v2(event_);
      for (Buffer &b : buffers_)
        if (b.own) driver_->cuMemFree_v2(b.own);
      if (module_) driver_->cuModuleUnload(module_);
    }
    if (retained_) driver_->cuDevicePrimaryCtxRelease_v2(0);
  }

  int32_t open(const char *path) override {
    std::string why;
    driver_ = driver(why);
    if (!driver_) return emmy_fail(EMMY_NO_DRIVER, why);
    std::ifstream file(path, std::ios::binary);
    if (!file) return EMMY_NO_FILE;
    const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    std::string bad;
    try {
      bad = parse(bytes);
    } catch (const std::out_of_range &) {
      bad = "a number is too large";
    }
    if (!bad.empty()) return emmy_fail(EMMY_NO_PLAN, "no GPU plan that this Emmy reads: " + bad);
    return load();
  }

  EmmyInfo info() const override {
    return EmmyInfo{n_arguments_, static_cast<int32_t>(syms_.size()), static_cast<int32_t>(kernels_.size()),
                    argument_names_.data(), sym_names_.data()};
  }

  int64_t argument_bytes(const int64_t *syms, int32_t argument) const override {
    const Buffer &b = buffers_[argument];
    return b.item_bytes * b.elements.of(syms);
  }

  int32_t run(void *const *arguments, const int64_t *syms, int32_t, void *stream) override {
    if (!is_bound(arguments, syms))
      if (int32_t code = bind(arguments, syms)) return code;
    Within here(*driver_, context_);
    if (int32_t code = follow(static_cast<CuStream>(stream))) return code;
    for (Kernel &k : kernels_) {
      const LaunchConfig config{static_cast<unsigned>(k.blocks.of(syms)), 1, 1, k.threads, 1, 1, k.smem_bytes,
                                static_cast<CuStream>(stream), k.attributes.data(),
                                static_cast<unsigned>(k.attributes.size())};
      if (CuResult r = driver_->cuLaunchKernelEx(&config, k.function, k.given.data(), nullptr))
        return failed(r, "launching " + k.name);
    }
    return EMMY_OK;
  }

 private:
  // Reads the lines and finds the cubin; says what is wrong, or nothing.
  std::string parse(const std::string &bytes) {
    std::size_t at = 0;
    for (int number = 1;; ++number) {
      const std::size_t end = bytes.find('\n', at);
      if (end == std::string::npos) return "it ends without a cubin";
      std::istringstream line(bytes.substr(at, end - at));
      at = end + 1;
      std::string word;
      line >> word;
      if (number == 1) {
        int version = 0;
        if (word != "emmy-gpu-plan" || !(line >> version)) return "it is another kind of file";
        if (version != 2) return "its version is " + std::to_string(version) + ", this Emmy reads 2: build it again";
      } else if (word == "cubin") {
        std::size_t size = 0;
        if (!(line >> size) || bytes.size() - at != size) return "its cubin is not of the size it says";
        if (kernels_.empty()) return "it launches no kernel";
        cubin_.assign(bytes, at, size);
        finish();
        return "";
      } else if (!(word == "sym"                               ? read_sym(line)
                   : word == "argument" || word == "workspace" ? read_buffer(line, word == "argument")
                   : word == "kernel"                          ? read_kernel(line)
                   : word == "cluster" || word == "early"      ? read_attribute(word, line)
                                                               : read_parameter(word, line))) {
        return "line " + std::to_string(number) + " cannot be read";
      }
    }
  }

  bool read_sym(std::istringstream &line) {
    Sym s;
    if (!(line >> s.name >> s.lo >> s.hi)) return false;
    syms_.push_back(s);
    return true;
  }

  bool read_buffer(std::istringstream &line, bool is_argument) {
    Buffer b;
    if (!(line >> b.name >> b.item_bytes) || !b.elements.read(line, syms_.size())) return false;
    if (is_argument && n_arguments_ != static_cast<int32_t>(buffers_.size())) return false;  // after a workspace
    n_arguments_ += is_argument;
    buffers_.push_back(b);
    return true;
  }

  bool read_kernel(std::istringstream &line) {
    Kernel k;
    if (!(line >> k.name >> k.threads >> k.smem_bytes) || !k.blocks.read(line, syms_.size())) return false;
    kernels_.push_back(k);
    return true;
  }

  bool read_attribute(const std::string &word, std::istringstream &line) {
    LaunchAttribute a{};
    if (word == "early") {
      a.id = kEarly, a.on = 1;
    } else {
      a.id = kClusterDimension, a.cluster[1] = a.cluster[2] = 1;
      if (!(line >> a.cluster[0]) || !a.cluster[0]) return false;
    }
    if (kernels_.empty()) return false;
    kernels_.back().attributes.push_back(a);
    return true;
  }

  bool read_parameter(const std::string &word, std::istringstream &line) {
    Parameter p;
    std::string name, dtype, colon;
    if (kernels_.empty() || !(line >> name)) return false;
    if (word == "size") {
      p.kind = Parameter::kSize;
      p.of = index(syms_, name);
    } else if (word == "pass" || word == "map") {
      p.kind = word == "map" ? Parameter::kMap : Parameter::kBuffer;
      p.of = index(buffers_, name);
    } else {
      return false;
    }
    if (p.of < 0) return false;
    if (p.kind == Parameter::kMap) {
      if (!(line >> dtype >> p.box[1] >> p.box[0] >> p.swizzle >> std::ws)) return false;
      if (line.peek() != ':' && (!(line >> p.box[2]) || !p.box[2] || !p.box[0])) return false;
      if (!(line >> colon) || colon != ":") return false;
      if (!p.columns.read(line, syms_.size()) || !p.rows.read(line, syms_.size())) return false;
      while (line >> std::ws && !line.eof()) {
        p.further.emplace_back();
        if (!p.further.back().read(line, syms_.size())) return false;
      }
      if (p.further.size() && (p.further.size() % 2 == 0 || (p.box[2] ? 3 : 2) + (p.further.size() - 1) / 2 > kRank)) return false;
      p.data_type = data_type(dtype);
      p.item_bytes = buffers_[p.of].item_bytes;
      if (p.data_type < 0) return false;
    }
    kernels_.back().parameters.push_back(p);
    return true;
  }

  template <class T>
  static int32_t index(const std::vector<T> &all, const std::string &name) {
    for (std::size_t i = 0; i < all.size(); ++i)
      if (all[i].name == name) return static_cast<int32_t>(i);
    return -1;
  }

  // Nothing moves in memory from here on.
  void finish() {
    for (Kernel &k : kernels_)
      for (Parameter &p : k.parameters)
        k.given.push_back(p.kind == Parameter::kMap      ? static_cast<void *>(&p.map)
                          : p.kind == Parameter::kBuffer ? static_cast<void *>(&p.address)
                                                         : static_cast<void *>(&p.size));
    for (int32_t i = 0; i < n_arguments_; ++i) argument_names_.push_back(buffers_[i].name.c_str());
    for (const Sym &s : syms_) sym_names_.push_back(s.name.c_str());
  }

  // The module and its functions, and workspaces for the largest sizes, so that running allocates nothing.
  int32_t load() {
    CuContext now = nullptr;
    if (CuResult r = driver_->cuCtxGetCurrent(&now)) return failed(r, "looking for a context");
    if (!now) {  // nobody chose a device: the first one's, which the CUDA runtime would use too
      if (CuResult r = driver_->cuDevicePrimaryCtxRetain(&now, 0)) return failed(r, "opening device 0");
      retained_ = true;
    }
    context_ = now;
    Within here(*driver_, context_);
    if (CuResult r = driver_->cuModuleLoadData(&module_, cubin_.data())) return failed(r, "loading the cubin");
    cubin_.clear();
    cubin_.shrink_to_fit();
    for (Kernel &k : kernels_) {
      if (CuResult r = driver_->cuModuleGetFunction(&k.function, module_, k.name.c_str()))
        return failed(r, "looking for kernel " + k.name);
      if (k.smem_bytes > kSmemWithoutAsking)
        if (CuResult r = driver_->cuFuncSetAttribute(k.function, kMaxDynamicSmem, static_cast<int>(k.smem_bytes)))
          return failed(r, "asking for " + std::to_string(k.smem_bytes) + " bytes of shared memory for " + k.name);
    }
    std::vector<int64_t> most;
    for (const Sym &s : syms_) most.push_back(s.hi);
    for (std::size_t i = n_arguments_; i < buffers_.size(); ++i) {
      Buffer &b = buffers_[i];
      const std::size_t size = static_cast<std::size_t>(argument_bytes(most.data(), static_cast<int32_t>(i)));
      if (CuResult r = driver_->cuMemAlloc_v2(&b.own, size))
        return failed(r, "allocating " + std::to_string(size) + " bytes for " + b.name);
      if (CuResult r = driver_->cuMemsetD8_v2(b.own, 0, size)) return failed(r, "clearing " + b.name);
    }
    if (n_arguments_ < static_cast<int32_t>(buffers_.size()))
      if (CuResult r = driver_->cuEventCreate(&event_, kWithoutTime)) return failed(r, "creating an event");
    // Launches go to streams that do not wait for the default one, on which flags are cleared.
    if (CuResult r = driver_->cuStreamSynchronize(nullptr)) return failed(r, "clearing workspaces");
    return EMMY_OK;
  }

  // Runs share the workspaces: on another stream than the last run's, the next one waits for that. Not while a graph is being
  // captured, which runs nothing now; whoever replays it keeps its replays apart from other runs.
  int32_t follow(CuStream stream) {
    if (!event_ || (ran_ && stream == last_)) return EMMY_OK;
    int capturing = 0;
    if (CuResult r = driver_->cuStreamIsCapturing(stream, &capturing)) return failed(r, "asking whether a graph is captured");
    if (capturing) return EMMY_OK;
    if (ran_) {
      CuResult r = driver_->cuEventRecord(event_, last_);
      if (!r) r = driver_->cuStreamWaitEvent(stream, event_, 0);
      if (r) return failed(r, "waiting for the last run, on another stream");
    }
    last_ = stream;
    ran_ = true;
    return EMMY_OK;
  }

  bool is_bound(void *const *arguments, const int64_t *syms) const {
    return bound_ && !std::memcmp(arguments, arguments_.data(), arguments_.size() * sizeof(void *)) &&
           !std::memcmp(syms, sizes_.data(), sizes_.size() * sizeof(int64_t));
  }

  // Writes addresses, sizes and tensor maps where the kernels' parameters are taken from.
  int32_t bind(void *const *arguments, const int64_t *syms) {
    bound_ = false;
    for (std::size_t i = 0; i < syms_.size(); ++i) {
      const Sym &s = syms_[i];
      if (syms[i] < s.lo || syms[i] > s.hi)
        return emmy_fail(EMMY_BAD_SIZE, s.name + " is " + std::to_string(syms[i]) + ", this plan serves " +
                                            std::to_string(s.lo) + ".." + std::to_string(s.hi));
    }
    for (Kernel &k : kernels_)
      for (Parameter &p : k.parameters) {
        if (p.kind == Parameter::kSize) {
          p.size = static_cast<int32_t>(syms[p.of]);
          continue;
        }
        const CuPointer own = buffers_[p.of].own;
        p.address = own ? own : reinterpret_cast<CuPointer>(arguments[p.of]);
        if (p.kind == Parameter::kMap)
          if (int32_t code = encode(p, syms)) return code;
      }
    arguments_.assign(arguments, arguments + n_arguments_);
    sizes_.assign(syms, syms + syms_.size());
    bound_ = true;
    return EMMY_OK;
  }

  int32_t encode(Parameter &p, const int64_t *syms) {
    const uint64_t columns = static_cast<uint64_t>(p.columns.of(syms)), rows = static_cast<uint64_t>(p.rows.of(syms));
    const uint64_t item = static_cast<uint64_t>(p.item_bytes), wide = p.box[2] ? p.box[0] : columns;
    const uint64_t row = p.further.empty() ? columns : static_cast<uint64_t>(p.further[0].of(syms));
    uint64_t size[kRank] = {wide, rows}, strides[kRank - 1] = {row * item};
    uint32_t box[kRank] = {p.box[0], p.box[1]}, rank = 2;
    const uint32_t every[kRank] = {1, 1, 1, 1, 1};
    if (p.box[2]) size[2] = columns / wide, strides[1] = wide * item, box[2] = p.box[2], rank = 3;
    for (std::size_t i = 1; i < p.further.size(); i += 2, ++rank) {
      size[rank] = static_cast<uint64_t>(p.further[i].of(syms)), box[rank] = 1;
      strides[rank - 1] = static_cast<uint64_t>(p.further[i + 1].of(syms)) * item;
    }
    CuResult r = driver_->cuTensorMapEncodeTiled(&p.map, p.data_type, rank, reinterpret_cast<void *>(p.address), size,
                                                 strides, box, every, 0, p.swizzle, kPromoteL2To256, 0);
    return r ? failed(r, "describing " + buffers_[p.of].name + " to the copy engine") : EMMY_OK;
  }

  int32_t failed(CuResult r, const std::string &doing) const {
    const char *text = nullptr;
    driver_->cuGetErrorString(r, &text);
    return emmy_fail(EMMY_CUDA + r, "CUDA error " + std::to_string(r) + ", " + (text ? text : "unknown") + ", while " + doing);
  }

  const Driver *driver_ = nullptr;
  CuContext context_ = nullptr;
  CuModule module_ = nullptr;
  CuEvent event_ = nullptr;  // of plans with workspaces
  CuStream last_ = nullptr;  // where the last run went, if one did
  bool retained_ = false, bound_ = false, ran_ = false;
  int32_t n_arguments_ = 0;
  std::string cubin_;
  std::vector<Sym> syms_;
  std::vector<Buffer> buffers_;  // arguments, then workspaces
  std::vector<Kernel> kernels_;
  std::vector<const char *> argument_names_, sym_names_;
  std::vector<void *> arguments_;  // what is bound
  std::vector<int64_t> sizes_;
};

}  // namespace

Backend *emmy_new_cuda() { return new Cuda; }
