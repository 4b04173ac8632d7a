// The split's mechanical work in C++: the walk over the graph, reading products and convolutions, and the loop of W.
//
// A `Cuts` is made of one graph. Where a graph has anything unusual, `make` says so, and Python plans it as without this
// file. Python is asked once what each kind of node is. Hooks are read off the nodes themselves, so that none is missed.
// What W finds changed meanwhile, such as a hook on a parameter, it gives back to Python, too.

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <typeindex>
#include <unordered_map>

namespace {

namespace products = torch::autograd::generated;
using at::Tensor;
using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::FunctionPreHook;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePtr = decltype(Edge::function); // a shared_ptr before torch 2.13
using Positions = std::vector<size_t>;

// What nodes of one kind are to the walk; native.py has the same list. The last five are read here.
enum class Role { Unusual, Plain, Leaf, T, Transpose, Cast, Cut, Convolution, Mm, Bmm, Addmm, Baddbmm };

struct Kind {
  Role role;
  Positions weights, lefts, biases; // the operands that have rules

  bool is_cut() const { return role >= Role::Cut; }
  bool is_read_here() const { return role > Role::Cut; }
};

py::object to_python(const NodePtr& node) {
  return py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node));
}

py::object to_python(const Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

struct Kinds {
  py::function look; // gives the role of a node, and which of its operands have rules
  py::function takes_data; // whether what a node makes is an activation of a graph without inputs, not a weight
  py::tuple ordinary; // the types of tensors that no subclass has a say in
  std::unordered_map<std::type_index, Kind> known;

  const Kind& of(const NodePtr& node) { // the reference stays valid: an unordered_map moves nothing
    const Node& pointed = *node;
    const std::type_index type = typeid(pointed);
    auto found = known.find(type);
    if (found == known.end()) {
      auto [role, weights, lefts, biases] =
          look(to_python(node)).cast<std::tuple<int, Positions, Positions, Positions>>();
      found = known.emplace(type, Kind{static_cast<Role>(role), weights, lefts, biases}).first;
    }
    return found->second;
  }

  bool are_ordinary(const Tensor& tensor) const {
    const py::object wrapped = to_python(tensor);
    const auto type = reinterpret_cast<PyObject*>(Py_TYPE(wrapped.ptr()));
    return std::any_of(ordinary.begin(), ordinary.end(), [&](py::handle each) { return each.ptr() == type; });
  }
};

// Whether a hook is a dictionary of Python's with nothing in it: one stays where all hooks were removed. torch does not
// export these classes, so that they are known by name.
template <class PythonHook, class Hook>
bool is_nothing(const Hook& hook, std::string_view name) {
  return typeid(hook).name() == name && PyDict_Size(static_cast<const PythonHook&>(hook).dict) == 0;
}

bool is_hook(const torch::autograd::FunctionPreHook& hook) {
  using namespace torch::autograd;
  return !is_nothing<PyFunctionPreHook>(hook, "N5torch8autograd17PyFunctionPreHookE") &&
      !is_nothing<PyFunctionTensorPreHook>(hook, "N5torch8autograd23PyFunctionTensorPreHookE");
}

bool is_hook(const torch::autograd::FunctionPostHook& hook) {
  return !is_nothing<torch::autograd::PyFunctionPostHook>(hook, "N5torch8autograd18PyFunctionPostHookE");
}

bool is_hook(const torch::autograd::PostAccumulateGradHook& hook) {
  return !is_nothing<torch::autograd::PyFunctionTensorPostAccGradHooks>(
      hook, "N5torch8autograd32PyFunctionTensorPostAccGradHooksE");
}

bool has_hooks(Node& node) {
  const auto is_there = [](const auto& hook) { return is_hook(*hook); };
  const auto any = [&](const auto& hooks) { return std::any_of(hooks.begin(), hooks.end(), is_there); };
  return any(node.pre_hooks()) || any(node.post_hooks()) || any(node.tensor_pre_hooks()) ||
      !node.retains_grad_hooks().empty();
}

uint32_t version_of(const Tensor& tensor) { // as in tensors.py
  return tensor.is_inference() ? 0 : tensor._version();
}

struct Sides { // of a product's or convolution's node: what it saved, and its factors
  SavedVariable *left, *right;
  at::Scalar alpha = 1, beta = 1;

  static Sides of(Node& node, Role role) {
    if (role == Role::Convolution) {
      auto& convolution = static_cast<products::ConvolutionBackward0&>(node);
      return {&convolution.input_, &convolution.weight_};
    } else if (role == Role::Mm) {
      auto& mm = static_cast<products::MmBackward0&>(node);
      return {&mm.self_, &mm.mat2_};
    } else if (role == Role::Bmm) {
      auto& bmm = static_cast<products::BmmBackward0&>(node);
      return {&bmm.self_, &bmm.mat2_};
    } else if (role == Role::Addmm) {
      auto& addmm = static_cast<products::AddmmBackward0&>(node);
      return {&addmm.mat1_, &addmm.mat2_, addmm.alpha, addmm.beta};
    }
    auto& baddbmm = static_cast<products::BaddbmmBackward0&>(node);
    return {&baddbmm.batch1_, &baddbmm.batch2_, baddbmm.alpha, baddbmm.beta};
  }
};

// What one term of a leaf's gradient is; native.py has the same list. A product's other side is known, or a convolution's
// input and filter.
enum class Term { Given, OfLeft, OfRight, Filter, Bias };

struct Convolution { // the settings of one, as aten::convolution_backward takes them after the tensors
  std::vector<c10::SymInt> stride, padding, dilation;
  bool transposed;
  std::vector<c10::SymInt> output_padding;
  c10::SymInt groups;

  static Convolution of(Node& node) {
    const auto& from = static_cast<products::ConvolutionBackward0&>(node);
    return {from.stride, from.padding, from.dilation, from.transposed, from.output_padding, from.groups};
  }

  Tensor filter_grad(const Tensor& grad, const Tensor& x, const Tensor& filter) const { // of it, only the shape matters
    return std::get<1>(at::convolution_backward_symint(
        grad, x, filter, std::nullopt, stride, padding, dilation, transposed, output_padding, groups,
        {false, true, false}));
  }
};

// A tensor that W needs beside a gradient, and whether it is as it was.
struct Kept {
  Tensor tensor;
  uint32_t version = 0;

  Kept() = default;
  explicit Kept(const Tensor& of) : tensor(of), version(version_of(of)) {}
  bool was_changed() const { return tensor.defined() && version_of(tensor) != version; }
};

// One term of a leaf's gradient; as Part and Later in Python.
struct Part {
  Edge edge;
  Term term = Term::Given;
  bool transposed = false, is_odd = false;
  at::Scalar scale = 1;
  std::optional<Convolution> convolution;
  Kept known, filter, grad;

  bool is_product() const { return term == Term::OfLeft || term == Term::OfRight; }

  void keep(Kept& in, const Tensor& saved, const Kinds& kinds) {
    is_odd |= !kinds.are_ordinary(saved) || saved.is_complex();
    in = Kept(saved.tensor_data()); // a saved tensor comes with its grad_fn, which would keep the graph alive
  }

  void keep_grad(const Tensor& arrived, const Kinds& kinds) {
    is_odd |= !kinds.are_ordinary(arrived) || !arrived.is_cpu() || (transposed && !is_product());
    grad = Kept(arrived);
  }

  bool was_changed() const { return grad.was_changed() || known.was_changed() || filter.was_changed(); }

  std::vector<Tensor> tensors() const {
    std::vector<Tensor> found{grad.tensor};
    for (const Kept* each : {&known, &filter}) {
      if (each->tensor.defined()) found.push_back(each->tensor);
    }
    return found;
  }

  bool fits(const Tensor& total) const {
    const auto is_like_it = [&](const Tensor& other) {
      return other.layout() == at::kStrided && other.dtype() == total.dtype();
    };
    const Tensor& given = grad.tensor;
    if (is_odd || !is_like_it(given) || (known.tensor.defined() && !is_like_it(known.tensor))) return false;
    if (term == Term::Given) {
      return given.sizes() == total.sizes() || (given.dim() > 0 && given.sizes().slice(1) == total.sizes());
    } else if (term == Term::Filter) {
      return filter.tensor.sizes() == total.sizes();
    } else if (term == Term::Bias) {
      return total.dim() == 1 && given.dim() > 1 && given.size(1) == total.size(0);
    }
    return known.tensor.dim() == total.dim() && given.dim() == total.dim() && (total.dim() == 2 || total.dim() == 3);
  }

  void add_to(Tensor& total) const {
    const Tensor& given = grad.tensor;
    if (term == Term::Given) {
      total.add_(given.sizes() == total.sizes() ? given : given.sum(0));
    } else if (term == Term::Filter) {
      total.add_(convolution->filter_grad(given, known.tensor, filter.tensor));
    } else if (term == Term::Bias) {
      std::vector<int64_t> others(given.dim() - 1); // all dimensions but the second
      for (int64_t at = 1; at < static_cast<int64_t>(others.size()); at++) others[at] = at + 1;
      total.add_(given.sum(others));
    } else {
      add_product(total);
    }
  }

 private:
  void add_product(Tensor& total) const {
    const bool of_right = term == Term::OfRight;
    const Tensor& first = of_right == transposed ? grad.tensor : known.tensor; // as Product.factors
    const Tensor& second = of_right == transposed ? known.tensor : grad.tensor;
    const Tensor left = of_right ? first.mT() : first, right = of_right ? second : second.mT();
    total.dim() == 2 ? total.addmm_(left, right, 1, scale) : total.baddbmm_(left, right, 1, scale);
  }
};

struct Leaf {
  NodePtr node;
  bool is_late; // its gradient is computed in W
  std::vector<Part> parts;

  // Whether W may add to .grad here: as Accumulator.writable, but for a first .grad, which Python makes.
  bool is_writable(const Kinds& kinds) const {
    const Tensor& parameter = static_cast<AccumulateGrad&>(*node).variable;
    const Tensor& total = parameter.grad();
    const auto& last_hook = torch::autograd::impl::post_acc_grad_hooks(parameter);
    return total.defined() && parameter.requires_grad() && !has_hooks(*node) && !(last_hook && is_hook(*last_hook)) &&
        kinds.are_ordinary(parameter) &&
        reinterpret_cast<PyObject*>(Py_TYPE(to_python(total).ptr())) == THPVariableClass &&
        total.layout() == at::kStrided && total.dtype() == parameter.dtype() && !total.requires_grad() &&
        std::all_of(parts.begin(), parts.end(), [&](const Part& part) { return part.fits(total); });
  }
};

struct Cut {
  NodePtr node;
  Role role;
  bool runs; // in I
  std::vector<std::pair<size_t, size_t>> parts; // which leaf, and which of its parts
  bool is_asked = false; // whether the engine is asked for the gradient here
  std::vector<c10::SafePyObject> packed = {}; // what hooks made of what it saved
  Tensor grad = {};
  FunctionPreHook* hook = nullptr;
};

class Cuts : public std::enable_shared_from_this<Cuts> {
 public:
  explicit Cuts(std::shared_ptr<Kinds> kinds) : kinds_(std::move(kinds)) {}

  bool make(const py::list& roots, const py::list& inputs);
  void arrive(size_t at, const Tensor& grad);
  void hook(py::function before_reading);
  void release();
  py::list finish(const py::list& grads);
  std::optional<Tensor> changed() const;
  bool reads(const py::iterable& storages) const;
  std::vector<Tensor> tensors() const;
  py::list take();
  py::list run();

  std::vector<bool> reached; // which inputs
  py::list others; // cuts that Python reads: a node, its parts, and whether it runs in I
  py::list bottom; // nodes of the other cuts that do not: nothing lies below them

  py::list leaves(bool late) const {
    py::list found;
    for (const Leaf& leaf : leaves_) {
      if (leaf.is_late == late) found.append(to_python(leaf.node));
    }
    return found;
  }

  // The cuts at which the engine is asked for the gradient: all, or those alone that it does not run.
  py::list ask(bool all) {
    py::list found;
    for (Cut& cut : cuts_) {
      cut.is_asked = all || !cut.runs;
      if (cut.is_asked) found.append(to_python(cut.node));
    }
    return found;
  }

  py::list packed() const {
    py::list found;
    for (const Cut& cut : cuts_) {
      py::list held;
      for (const auto& each : cut.packed) held.append(py::handle(each.ptr(getPyInterpreter())));
      found.append(held);
    }
    return found;
  }

 private:
  std::shared_ptr<Kinds> kinds_;
  std::vector<Leaf> leaves_;
  std::vector<Cut> cuts_;
  py::function before_reading_;
  // For the walk alone:
  std::vector<Edge> inputs_;
  ska::flat_hash_set<const Node*> input_nodes_, spine_, deferred_, elsewhere_; // the last: leaves that Python adds to
  ska::flat_hash_map<const Node*, bool> leads_;
  ska::flat_hash_map<const Node*, size_t> leaf_at_;

  bool is_input(const Edge& edge) const {
    return input_nodes_.count(edge.function.get()) != 0 &&
        std::find(inputs_.begin(), inputs_.end(), edge) != inputs_.end();
  }

  bool takes_data(const NodePtr& node) const;
  bool leads_on(const NodePtr& start);
  bool find_leaf(const Edge& edge, NodePtr& leaf, bool& transposed) const;
  bool find_parts(const Node& node, const Positions& operands, std::vector<std::tuple<size_t, NodePtr, bool>>& found);
  bool cut(const NodePtr& node, const Kind& kind, uint64_t& skipped);
  bool read(Cut& cut);
  py::tuple give_back(Leaf& leaf) const;
  size_t place(const NodePtr& leaf, bool late);
};

// Whether a node makes an activation of a graph without inputs: as takes_data in Python.
bool Cuts::takes_data(const NodePtr& node) const {
  const Kind& kind = kinds_->of(node);
  if (!kind.is_cut()) return false;
  bool has_all = node->num_outputs() > 1;
  for (size_t i = 0; i < node->num_outputs(); i++) {
    has_all &= node->next_edge(i).function || std::count(kind.biases.begin(), kind.biases.end(), i) != 0;
  }
  if (has_all) return false;
  const py::object seen = to_python(node);
  return kinds_->takes_data(seen, seen.attr("next_functions")).cast<bool>();
}

// Whether an input lies behind a node; in a graph without inputs, data. Depth first, without recursion, as Search.
bool Cuts::leads_on(const NodePtr& start) {
  std::vector<const NodePtr*> stack{&start};
  while (!stack.empty()) {
    const NodePtr& node = *stack.back();
    if (leads_.count(node.get())) {
      stack.pop_back();
      continue;
    }
    const size_t before = stack.size();
    bool leads = inputs_.empty() && takes_data(node);
    for (const Edge& edge : node->next_edges()) {
      if (!edge.function || leads) continue;
      const auto found = leads_.find(edge.function.get());
      leads = is_input(edge) || (found != leads_.end() && found->second);
      if (found == leads_.end()) stack.push_back(&edge.function);
    }
    if (leads) stack.resize(before);
    if (stack.size() == before) leads_[node.get()] = leads;
  }
  return leads_[start.get()];
}

// The leaf that an edge leads to through transposes and casts alone: as direct_target in Python.
bool Cuts::find_leaf(const Edge& edge, NodePtr& leaf, bool& transposed) const {
  bool cast = false;
  transposed = false;
  for (const Edge* at = &edge; at->function && !input_nodes_.count(at->function.get());) {
    Node& node = *at->function;
    const Role role = kinds_->of(at->function).role;
    if (role == Role::Leaf) {
      leaf = at->function;
      return true;
    }
    if (has_hooks(node) || node.num_inputs() != 1 || node.num_outputs() != 1) return false;
    const auto& made = node.input_metadata(0);
    const Edge& next = node.next_edge(0);
    if (role == Role::Cast) {
      if (cast || !next.function) return false;
      const auto& from = next.function->input_metadata(next.input_nr);
      const auto is_complex = [](const auto& slot) { return c10::isComplexType(slot.dtype().toScalarType()); };
      if (made.device() != from.device() || is_complex(made) != is_complex(from)) return false;
      cast = true;
    } else if (role == Role::T || role == Role::Transpose) {
      const auto ndim = static_cast<int64_t>(made.shape_as_dim_vector().size());
      if (role == Role::Transpose) {
        const auto& swap = static_cast<products::TransposeBackward0&>(node);
        const auto one = c10::maybe_wrap_dim(swap.dim0, ndim), two = c10::maybe_wrap_dim(swap.dim1, ndim);
        if (std::min(one, two) != ndim - 2 || std::max(one, two) != ndim - 1) return false;
      } else if (ndim != 2) {
        return false;
      }
      transposed = !transposed;
    } else {
      return false;
    }
    at = &next;
  }
  return false;
}

// The operands that lead straight to leaves. False where one could wait in another way, which Python plans.
bool Cuts::find_parts(const Node& node, const Positions& operands, std::vector<std::tuple<size_t, NodePtr, bool>>& found) {
  for (const size_t position : operands) {
    if (position >= node.num_outputs() || !node.next_edge(position).function) continue;
    const Edge& edge = node.next_edge(position);
    NodePtr leaf;
    bool transposed = false;
    if (find_leaf(edge, leaf, transposed)) {
      found.emplace_back(position, leaf, transposed);
    } else if (!is_input(edge) && !leads_on(edge.function)) {
      return false;
    }
  }
  return true;
}

size_t Cuts::place(const NodePtr& leaf, bool late) {
  const auto [found, is_new] = leaf_at_.emplace(leaf.get(), leaves_.size());
  if (is_new) leaves_.push_back({leaf, late, {}});
  return found->second;
}

// What the gradient of an operand is.
Term term_of(Role role, size_t position) {
  if (role == Role::Convolution) return position == 1 ? Term::Filter : Term::Bias;
  const size_t bias = role >= Role::Addmm; // comes first, where there is one
  if (position < bias) return Term::Given;
  return position == bias ? Term::OfLeft : Term::OfRight;
}

// Make the node a cut, if operands of it can wait, and say which edges I skips: as _Planner.cut in Python.
bool Cuts::cut(const NodePtr& node, const Kind& kind, uint64_t& skipped) {
  std::vector<std::tuple<size_t, NodePtr, bool>> found;
  if (!find_parts(*node, kind.weights, found) || (found.empty() && !find_parts(*node, kind.lefts, found))) return false;
  if (found.empty()) return true;
  if (!find_parts(*node, kind.biases, found)) return false;
  for (const auto& [position, leaf, transposed] : found) {
    if (position >= 64) return false;
    skipped |= uint64_t{1} << position;
    deferred_.insert(leaf.get());
  }
  bool goes_on = false; // otherwise nothing lies below it, and I does not run it: only in a graph without inputs
  for (size_t i = 0; i < node->num_outputs(); i++) goes_on |= node->next_edge(i).function && !(i < 64 && skipped >> i & 1);
  if (!inputs_.empty() && !(goes_on && leads_on(node))) return false;
  if (!kind.is_read_here()) {
    py::list parts;
    for (const auto& [position, leaf, transposed] : found) {
      const Edge& edge = node->next_edge(position);
      parts.append(py::make_tuple(to_python(edge.function), edge.input_nr, to_python(leaf), transposed, position));
      elsewhere_.insert(leaf.get());
    }
    others.append(py::make_tuple(to_python(node), parts, goes_on));
    return true;
  }
  Cut made{node, kind.role, goes_on, {}};
  for (const auto& [position, leaf, transposed] : found) {
    Part part{node->next_edge(position), term_of(kind.role, position), transposed};
    Leaf& to = leaves_[place(leaf, true)];
    made.parts.emplace_back(&to - leaves_.data(), to.parts.size());
    to.parts.push_back(std::move(part));
  }
  const Sides sides = Sides::of(*node, kind.role);
  for (const SavedVariable* side : {sides.left, sides.right}) {
    if (const auto hooks = side->retrieve_unpack_hook_data()) {
      made.packed.push_back(hooks->second);
    } else if (side->has_hooks()) {
      return false;
    }
  }
  if (sides.alpha.isComplex() || sides.alpha.isSymbolic() || !sides.beta.equal(1)) return false;
  if (made.packed.empty() ? !read(made) : !goes_on) return false;
  if (!goes_on) bottom.append(to_python(node));
  cuts_.push_back(std::move(made));
  return true;
}

// Read what W needs off a cut's node; false where it is gone.
bool Cuts::read(Cut& cut) {
  const Sides sides = Sides::of(*cut.node, cut.role);
  for (const auto& [leaf, at] : cut.parts) {
    Part& part = leaves_[leaf].parts[at];
    if (part.term == Term::Given || part.term == Term::Bias) continue;
    const Tensor known = (part.term == Term::OfLeft ? sides.right : sides.left)->unpack();
    if (!known.defined()) return false;
    part.keep(part.known, known, *kinds_);
    part.scale = sides.alpha;
    if (part.term != Term::Filter) continue;
    const Tensor filter = sides.right->unpack();
    if (!filter.defined()) return false;
    part.keep(part.filter, filter, *kinds_);
    part.convolution = Convolution::of(*cut.node);
  }
  return true;
}

// The place in the graph that Python has as a node and a number; a node of a custom Function gives none.
std::optional<Edge> place_of(const py::handle& place) {
  const auto [node, index] = place.cast<std::tuple<py::object, uint32_t>>();
  if (!torch::autograd::THPCppFunction_Check(node.ptr())) return std::nullopt;
  return Edge(reinterpret_cast<torch::autograd::THPCppFunction*>(node.ptr())->cdata, index);
}

// Walk the graph from its roots, as _Planner.walk in Python. False where it has anything unusual; nothing has happened.
bool Cuts::make(const py::list& roots, const py::list& inputs) try {
  for (const auto& input : inputs) {
    const auto place = place_of(input);
    if (!place) return false;
    inputs_.push_back(*place);
    input_nodes_.insert(place->function.get());
  }
  spine_.reserve(1024), leads_.reserve(1024);
  reached.resize(inputs_.size());
  std::vector<NodePtr> stack;
  for (const auto& root : roots) {
    const auto place = place_of(root);
    if (!place || is_input(*place) || !place->function->input_metadata(place->input_nr).device().is_cpu()) return false;
    stack.push_back(place->function);
  }
  std::vector<NodePtr> ready;
  while (!stack.empty()) {
    const NodePtr node = std::move(stack.back());
    stack.pop_back();
    if (!spine_.insert(node.get()).second) continue;
    const Kind& kind = kinds_->of(node);
    uint64_t skipped = 0;
    if (kind.role == Role::Unusual || kind.role == Role::Leaf || has_hooks(*node)) return false;
    if (kind.is_cut() && !cut(node, kind, skipped)) return false;
    for (size_t i = 0; i < node->num_outputs(); i++) {
      const Edge& edge = node->next_edge(i);
      if (!edge.function || (i < 64 && skipped >> i & 1)) continue;
      if (is_input(edge)) {
        reached[std::find(inputs_.begin(), inputs_.end(), edge) - inputs_.begin()] = true;
      } else if (kinds_->of(edge.function).role != Role::Leaf) {
        stack.push_back(edge.function);
      } else if (spine_.insert(edge.function.get()).second) {
        ready.push_back(edge.function);
      }
    }
  }
  for (const NodePtr& leaf : ready) place(leaf, false);
  const auto is_ready = [&](const Node* leaf) { return spine_.count(leaf) != 0; };
  const auto is_here = [&](const Node* leaf) { return leaf_at_.count(leaf) != 0; }; // in which order would W add?
  return std::none_of(deferred_.begin(), deferred_.end(), is_ready) &&
      std::none_of(elsewhere_.begin(), elsewhere_.end(), is_here);
} catch (const c10::Error&) { // what was saved is gone, or was changed: Python says so
  return false;
}

struct Arrival : FunctionPreHook {
  std::shared_ptr<Cuts> cuts;
  size_t at;

  Arrival(std::shared_ptr<Cuts> cuts, size_t at) : cuts(std::move(cuts)), at(at) {}

  variable_list operator()(const variable_list& grads) override {
    cuts->arrive(at, grads[0]);
    return grads;
  }
};

// Just before a cut's node runs: keep the gradient, and read what a checkpoint has packed.
void Cuts::arrive(size_t at, const Tensor& grad) {
  Cut& cut = cuts_[at];
  if (!cut.packed.empty()) {
    py::gil_scoped_acquire gil;
    before_reading_(at, cut.parts.size());
    read(cut);
  }
  cut.grad = grad;
}

// Let the gradients that nobody asks for be kept as the nodes run, until release(). `before_reading` is called with a
// cut's number, and how often what it saved may be read.
void Cuts::hook(py::function before_reading) {
  before_reading_ = std::move(before_reading);
  for (size_t at = 0; at < cuts_.size(); at++) {
    if (cuts_[at].is_asked) continue;
    auto hook = std::make_unique<Arrival>(shared_from_this(), at);
    cuts_[at].hook = hook.get();
    cuts_[at].node->add_pre_hook(std::move(hook));
  }
}

void Cuts::release() {
  for (Cut& cut : cuts_) {
    if (cut.hook == nullptr) continue;
    auto& hooks = cut.node->pre_hooks();
    hooks.erase(
        std::remove_if(hooks.begin(), hooks.end(), [&](const auto& each) { return each.get() == cut.hook; }),
        hooks.end());
    cut.hook = nullptr;
  }
  before_reading_ = py::function();
}

// Take the gradients that the engine was asked for, of the ready leaves and of cuts. Gives the leaves at which none
// arrived, each as often as that was so. The graph is not held any more.
py::list Cuts::finish(const py::list& grads) {
  py::list missed;
  size_t next = 0;
  for (Leaf& leaf : leaves_) {
    if (leaf.is_late) continue;
    const auto grad = grads[next++].cast<std::optional<Tensor>>();
    if (grad) {
      leaf.parts.push_back({{leaf.node, 0}});
      leaf.parts.back().keep_grad(*grad, *kinds_);
    } else {
      missed.append(to_python(leaf.node));
    }
  }
  for (Cut& cut : cuts_) {
    if (cut.is_asked) cut.grad = grads[next++].cast<std::optional<Tensor>>().value_or(Tensor());
    for (const auto& [leaf, at] : cut.parts) {
      if (cut.grad.defined()) {
        leaves_[leaf].parts[at].keep_grad(cut.grad, *kinds_);
      } else {
        missed.append(to_python(leaves_[leaf].node));
      }
    }
  }
  for (Leaf& leaf : leaves_) {
    const auto is_missed = [](const Part& part) { return !part.grad.tensor.defined(); };
    leaf.parts.erase(std::remove_if(leaf.parts.begin(), leaf.parts.end(), is_missed), leaf.parts.end());
  }
  const auto is_empty = [](const Leaf& leaf) { return leaf.parts.empty(); };
  leaves_.erase(std::remove_if(leaves_.begin(), leaves_.end(), is_empty), leaves_.end());
  cuts_.clear();
  inputs_.clear();
  others = py::list(), bottom = py::list();
  return missed;
}

// The gradient of a part that was changed in place since I.
std::optional<Tensor> Cuts::changed() const {
  for (const Leaf& leaf : leaves_) {
    for (const Part& part : leaf.parts) {
      if (part.was_changed()) return part.grad.tensor;
    }
  }
  return std::nullopt;
}

// Whether anything that W reads lies in one of these storages, given by their addresses, or could.
bool Cuts::reads(const py::iterable& storages) const {
  ska::flat_hash_set<uintptr_t> among;
  for (const auto& each : storages) among.insert(each.cast<uintptr_t>());
  for (const Leaf& leaf : leaves_) {
    for (const Part& part : leaf.parts) {
      for (const Tensor* each : {&part.grad.tensor, &part.known.tensor}) {
        if (part.is_odd && each->defined() && !kinds_->are_ordinary(*each)) return true; // Python knows what is in it
        if (!each->has_storage()) continue;
        if (among.count(reinterpret_cast<uintptr_t>(each->storage().unsafeGetStorageImpl()))) return true;
      }
    }
  }
  return false;
}

std::vector<Tensor> Cuts::tensors() const {
  std::vector<Tensor> found;
  for (const Leaf& leaf : leaves_) {
    for (const Part& part : leaf.parts) {
      for (Tensor& tensor : part.tensors()) found.push_back(std::move(tensor));
    }
  }
  return found;
}

py::tuple Cuts::give_back(Leaf& leaf) const {
  py::list parts;
  for (const Part& part : leaf.parts) {
    py::object settings = py::none();
    if (const auto& from = part.convolution) {
      settings = py::make_tuple(
          from->stride, from->padding, from->dilation, from->transposed, from->output_padding, from->groups);
    }
    parts.append(py::make_tuple(
        to_python(part.edge.function), part.edge.input_nr, part.transposed, static_cast<int>(part.term), part.scale,
        settings, part.tensors()));
  }
  leaf.parts.clear();
  return py::make_tuple(to_python(leaf.node), parts);
}

// All that is held, for Python: each leaf, and its parts, from the last to the first.
py::list Cuts::take() {
  py::list found;
  for (auto leaf = leaves_.rbegin(); leaf != leaves_.rend(); leaf++) found.append(give_back(*leaf));
  leaves_.clear();
  return found;
}

// W: add to .grad, from the last leaf to the first, as DirectWork in Python. Gives what Python must do, as take() does.
py::list Cuts::run() {
  py::list left;
  std::vector<Leaf> todo = std::move(leaves_);
  leaves_.clear();
  std::vector<Leaf> direct;
  for (auto leaf = todo.rbegin(); leaf != todo.rend(); leaf++) {
    if (leaf->is_writable(*kinds_)) {
      direct.push_back(std::move(*leaf));
    } else {
      left.append(give_back(*leaf));
    }
  }
  todo.clear();
  py::gil_scoped_release no_gil;
  for (Leaf& leaf : direct) {
    Tensor total = static_cast<AccumulateGrad&>(*leaf.node).variable.mutable_grad();
    for (Part& part : leaf.parts) {
      part.add_to(total);
      part = Part(); // free as soon as possible
    }
  }
  return left;
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using torch::wrap_pybind_function;
  py::class_<Kinds, std::shared_ptr<Kinds>>(module, "Kinds")
      .def(py::init([](py::function look, py::function takes_data, py::tuple ordinary) {
        return std::make_shared<Kinds>(Kinds{std::move(look), std::move(takes_data), std::move(ordinary), {}});
      }));
  py::class_<Cuts, std::shared_ptr<Cuts>>(module, "Cuts")
      .def(py::init<std::shared_ptr<Kinds>>())
      .def_readonly("reached", &Cuts::reached)
      .def_readonly("others", &Cuts::others)
      .def_readonly("bottom", &Cuts::bottom)
      .def("make", wrap_pybind_function(&Cuts::make))
      .def("leaves", wrap_pybind_function(&Cuts::leaves))
      .def("ask", wrap_pybind_function(&Cuts::ask))
      .def("packed", wrap_pybind_function(&Cuts::packed))
      .def("hook", wrap_pybind_function(&Cuts::hook))
      .def("release", wrap_pybind_function(&Cuts::release))
      .def("finish", wrap_pybind_function(&Cuts::finish))
      .def("changed", wrap_pybind_function(&Cuts::changed))
      .def("reads", wrap_pybind_function(&Cuts::reads))
      .def("tensors", wrap_pybind_function(&Cuts::tensors))
      .def("take", wrap_pybind_function(&Cuts::take))
      .def("run", wrap_pybind_function(&Cuts::run));
}
